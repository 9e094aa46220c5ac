"""What a rank asks of its process group."""

from __future__ import annotations

from typing import Any

import torch

from tgi_trio.shard.ranks.distributed import ProcessGroup


class Told:
    """A group of one rank that notes which collectives run in a stream of their own."""

    def __init__(self) -> None:
        self.aside: list[bool] = []

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Told:
        self.aside.append(options.asyncOp)
        return self

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Told:
        self.aside.append(options.asyncOp)
        return self

    def _allgather_base(self, parts: torch.Tensor, own: torch.Tensor, options: Any) -> Told:
        parts.copy_(own)
        self.aside.append(options.asyncOp)
        return self

    def wait(self) -> None: ...


def test_every_collective_takes_its_turn_in_the_stream_that_computes() -> None:
    group, x = ProcessGroup(told := Told(), 0, 1), torch.ones(2, 3)
    group.all_reduce(x)
    assert torch.equal(group.all_gather(x), x)
    group.broadcast(x)
    assert group.least(7, x.device) == 7
    assert told.aside == [False] * 4
