"""A process group of ranks whose devices are stand-ins; see `stand_in_device.py`.

    group = ProcessGroup(StandInGroup(gloo_group(store, rank, size), device), rank, size)

gloo is given the numbers that tensors of the stand-in hold. As with NCCL a collective is a launch
of its device, which takes its turn there, is recorded and replayed; what is not, is that the host
waits here until all ranks have come to it.
"""

# mypy: disable-error-code="no-any-return"
# torch's process groups carry no types.

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed

from tgi_trio.testing.stand_in_device import StandInDevice
from tgi_trio.testing.stand_in_tensor import DeviceTensor, MixedDevices, held

_c10d: Any = torch.distributed  # its process groups carry no types


class _Done:
    """A collective that is over."""

    def wait(self) -> None: ...


class StandInGroup:
    """What `ProcessGroup` needs of one of torch's, for the tensors of `device`."""

    def __init__(
        self,
        group: Any,
        device: StandInDevice,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`group`: gloo's, of the same ranks; `waiting`: entered while others are waited for."""
        self._group = group
        self._device = device
        self._waiting = waiting

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> _Done:
        """Replace a tensor by the sum over all ranks, or by the least of it.

        That is what a warm-up asks for, whose host reads it: it is computed in an idle one, too.
        """
        own, read = self._held(tensors), options.reduceOp == _c10d.ReduceOp.MIN
        begin = partial(self._group.allreduce, own, options)
        return self._launch("all_reduce", begin, read=read)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> _Done:
        """Replace a tensor by that of the root."""
        own = self._held(tensors)
        return self._launch("broadcast", lambda: self._group.broadcast(own, options))

    def _allgather_base(self, parts: torch.Tensor, own: torch.Tensor, options: Any) -> _Done:
        """Fill [size * n, ...] with all ranks' `own` [n, ...]."""
        into, mine = self._held([parts, own])
        return self._launch("all_gather", lambda: self._group._allgather_base(into, mine, options))

    def _held(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if not all(isinstance(x, DeviceTensor) for x in tensors):
            raise MixedDevices("a collective is given a tensor of the host")
        return [held(x) for x in tensors]

    def _launch(self, name: str, begin: Callable[[], Any], *, read: bool = False) -> _Done:
        def run() -> None:
            with self._waiting():
                begin().wait()

        if read and self._device.idles:
            run()
        self._device.launch(name, run)
        return _Done()
