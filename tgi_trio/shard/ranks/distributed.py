"""What the ranks of a group tell each other while they compute: sums, pieces, the least of all.

One torch process group per rank and no global one. The ranks find each other through a file
without a name that the router creates and passes down, and on a CPU talk over loopback, so nothing
is left behind however they end.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed

# A rank that hangs is the supervisor's to notice (--stall-timeout); this only ends a wait for ever.
_TIMEOUT = timedelta(minutes=30)

_c10d: Any = torch.distributed  # its process groups carry no types


class ProcessGroup:
    """This rank's place among `size` ranks that call the same methods in the same order."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        """`group`: one of torch's process groups; see `connect` and `gloo_group`."""
        self.rank = rank
        self.size = size
        self._group = group

    @classmethod
    def connect(cls, rendezvous: int, rank: int, size: int, device: torch.device) -> ProcessGroup:
        """Meet the other ranks at the file behind descriptor `rendezvous`; waits for all of them.

        gloo on a CPU, NCCL on CUDA. Raises RuntimeError when they do not come.
        """
        store = _c10d.FileStore(f"/proc/self/fd/{rendezvous}", size)
        if device.type == "cuda":
            torch.cuda.set_device(device)
            options = _c10d.ProcessGroupNCCL.Options()
            options._timeout = _TIMEOUT
            return cls(_c10d.ProcessGroupNCCL(store, rank, size, options), rank, size)
        return cls(gloo_group(store, rank, size), rank, size)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' `x`, bit for bit the same on each; `x` is overwritten."""
        x = x.contiguous()
        self._group.allreduce([x], _at_once(_c10d.AllreduceOptions())).wait()
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return all ranks' `x` [..., n], of one shape, joined in rank order: [..., size * n]."""
        parts = x.new_empty((self.size * len(x), *x.shape[1:]))
        self._group._allgather_base(parts, x.contiguous()).wait()
        return parts.view(self.size, *x.shape).movedim(0, -2).flatten(-2)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Return rank 0's `x`, contiguous and of one shape; those of the others are overwritten."""
        self._group.broadcast([x], _at_once(_c10d.BroadcastOptions())).wait()
        return x

    def least(self, value: int, device: torch.device) -> int:
        """Return the least of all ranks' `value`s."""
        options = _c10d.AllreduceOptions()
        options.reduceOp = _c10d.ReduceOp.MIN
        numbers = torch.full((1,), value, dtype=torch.int64, device=device)
        self._group.allreduce([numbers], options).wait()
        return int(numbers)


def _at_once(options: Any) -> Any:
    """Have a collective take its turn in the stream that computes, not in one beside it."""
    options.asyncOp = False
    return options


def gloo_group(store: Any, rank: int, size: int) -> Any:
    """Return a process group over loopback whose ranks meet at one of torch's stores."""
    options = _c10d.ProcessGroupGloo._Options()
    options._devices = [_c10d.ProcessGroupGloo.create_device(interface="lo")]
    options._timeout = _TIMEOUT
    options._threads = 1  # collectives follow each other; more threads would only wake up
    return _c10d.ProcessGroupGloo(store, rank, size, options)
