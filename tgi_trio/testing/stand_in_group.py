"""A process group of ranks with simulated devices; see `stand_in_device.py`.

    group = ProcessGroup(StandInGroup(gloo_group(store, rank, size), device), rank, size)

gloo computes over the numbers of the stand-in's tensors. As with NCCL, a collective is launched on
its device in order, and can be captured and replayed. Unlike NCCL, the host waits until all ranks
have reached the collective.
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
    """A completed collective."""

    def wait(self) -> None: ...


class StandInGroup:
    """The methods of a torch process group that `ProcessGroup` calls, for tensors of `device`."""

    def __init__(
        self,
        group: Any,
        device: StandInDevice,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`group`: gloo's, of the same ranks; `waiting`: entered while waiting for other ranks."""
        self._group = group
        self._device = device
        self._waiting = waiting

    def close(self) -> None:
        """Close gloo's connections, which recordings would hold until garbage is collected.

        No rank may be waiting for another one.
        """
        self._group = None

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> _Done:
        """Replace a tensor by the sum over all ranks, or by the minimum.

        The minimum is computed even if the device idles, because the warm-up's host reads it.
        """
        own, read = self._held(tensors), options.reduceOp == _c10d.ReduceOp.MIN
        return self._launch(
            "all_reduce", lambda: self._group.allreduce(own, options), own, read=read
        )

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> _Done:
        """Replace a tensor by the root's."""
        own = self._held(tensors)
        return self._launch("broadcast", lambda: self._group.broadcast(own, options), own)

    def _allgather_base(self, parts: torch.Tensor, own: torch.Tensor, options: Any) -> _Done:
        """Fill `parts` [size * n, ...] with all ranks' `own` [n, ...]."""
        into, mine = self._held([parts, own])
        return self._launch(
            "all_gather", lambda: self._group._allgather_base(into, mine, options), [into]
        )

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> _Done:
        """Send a tensor to a rank."""
        own = self._held(tensors)
        return self._launch("send", lambda: self._group.send(own, to, tag), [])

    def recv(self, tensors: list[torch.Tensor], sender: int, tag: int) -> _Done:
        """Fill a tensor with the next one that a rank sends."""
        own = self._held(tensors)
        return self._launch("receive", lambda: self._group.recv(own, sender, tag), own)

    def _held(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if not all(isinstance(x, DeviceTensor) for x in tensors):
            raise MixedDevices("a collective is given a tensor of the host")
        return [held(x) for x in tensors]

    def _launch(
        self, name: str, begin: Callable[[], Any], into: list[torch.Tensor], *, read: bool = False
    ) -> _Done:
        run = partial(self._fill, into, begin)
        if read and self._device.idles:
            run()
        self._device.launch(name, run)
        return _Done()

    def _fill(self, into: list[torch.Tensor], begin: Callable[[], Any]) -> None:
        """Compute a collective, which writes `into` as no operation of torch's dispatcher does."""
        with self._waiting():
            begin().wait()
