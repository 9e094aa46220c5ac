"""What a rank asks of its process group."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch

from tests.shard.ranks.rank_processes import groups
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_in_order_do_not_follow_the_number_of_rows(dtype: torch.dtype) -> None:
    """Those of a library may: it adds up pieces of a message, each in an order of its own."""
    size, rows = 4, 37
    parts = torch.randn(size, rows, 48, generator=torch.Generator().manual_seed(1)).to(dtype)
    with groups(size, in_order=True) as (together, members):

        def add_up(count: int) -> list[torch.Tensor]:
            return together(lambda rank: members[rank].all_reduce(parts[rank, :count].clone()))

        every = add_up(rows)
        for count in (1, 5):
            assert all(torch.equal(some, every[0][:count]) for some in add_up(count))
    assert all(torch.equal(other, every[0]) for other in every)
    wide = parts.float()
    assert torch.equal(every[0], (((wide[0] + wide[1]) + wide[2]) + wide[3]).to(dtype))


def test_ranks_of_tests_leave_no_descriptors() -> None:
    """They did until garbage was collected."""
    before = len(os.listdir("/proc/self/fd"))
    gc.disable()
    try:
        with groups(2) as (together, members):
            kept = members  # as a runner does
            together(lambda rank: members[rank].all_reduce(torch.ones(3)))
            assert len(os.listdir("/proc/self/fd")) > before
        assert len(os.listdir("/proc/self/fd")) == before and len(kept) == 2
    finally:
        gc.enable()
