"""Collectives among the ranks of a group: all-reduce, all-gather, broadcast, send and receive.

Each rank has one torch process group, and there is no global one. The ranks of one machine meet at
an anonymous file that the router creates and passes down, and communicate over loopback on a CPU,
so nothing is left behind however they end. Ranks on several machines meet at a socket of rank 0,
and each uses the address of its machine from which rank 0 is reached.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeAlias

import torch
import torch.distributed

from tgi_trio.model.stages import Stage

# A rank that hangs is the supervisor's to notice (--stall-timeout); this only ends a wait for ever.
_TIMEOUT = timedelta(minutes=30)

# Makes one of torch's process groups: (store, rank, ranks).
MakeGroup: TypeAlias = Callable[[Any, int, int], Any]
_c10d: Any = torch.distributed  # its process groups carry no types
_SIOCGIFADDR: Final = 0x8915  # what asks for an interface's address: linux/sockios.h


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of a group meet."""

    descriptor: int  # of a file; with an address: rank 0's socket, which listens there
    address: str = ""  # host:port; "": all ranks are on one machine

    @property
    def host(self) -> str:
        """The host of the address, without brackets."""
        return self.address.rpartition(":")[0].strip("[]")

    def open_store(self, rank: int, size: int) -> Any:
        """Return a torch store that all ranks share. Raises RuntimeError if they do not meet."""
        if not self.address:
            return _c10d.FileStore(f"/proc/self/fd/{self.descriptor}", size)
        port = int(self.address.rpartition(":")[2])
        listening = {"master_listen_fd": self.descriptor} if rank == 0 else {}
        return _c10d.TCPStore(
            self.host, port, size, rank == 0, timeout=_TIMEOUT, wait_for_workers=False, **listening
        )


def own_address(host: str) -> str:
    """Return this machine's address on the route to `host`; sends nothing."""
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        name: str = probe.getsockname()[0]
        return name


def find_interface(address: str) -> str:
    """Return the name of the interface with an IPv4 address; "" if none has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has none
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return ""


class ProcessGroup:
    """A rank's end of the group; all ranks call the same methods in the same order.

    Ranks that form the stages of a pipeline are in two groups: that of all, and that of their stage
    (`parts`).
    """

    def __init__(self, group: Any, rank: int, size: int, *, in_order: bool = False) -> None:
        """`group`: one of torch's process groups; see `connect` and `gloo_group`.

        `in_order`: sums are of the ranks' parts in the order of the ranks, whatever their size.
        """
        self.rank = rank
        self.size = size
        # Those that divide this rank's layers among them; None: it has its layers alone.
        self.parts: ProcessGroup | None = self
        self._group = group
        self._in_order = in_order
        self._sending: tuple[torch.Tensor, Any] | None = None  # a send that may not be complete

    @classmethod
    def connect(
        cls,
        meeting: Meeting,
        rank: int,
        size: int,
        device: torch.device,
        stages: int = 1,
        *,
        in_order: bool = False,
    ) -> ProcessGroup:
        """Connect to the other ranks, which form so many `stages`, waiting for all of them.

        Uses gloo on a CPU, NCCL on CUDA; `in_order`: see the constructor. Raises RuntimeError if
        they do not connect.
        """
        store = meeting.open_store(rank, size)
        address = own_address(meeting.host) if meeting.address else ""
        if device.type == "cuda":
            torch.cuda.set_device(device)
            if address and (interface := find_interface(address)):
                os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
            return cls.form(nccl_group, store, rank, size, stages, in_order=in_order)
        make = partial(gloo_group, address=address)
        return cls.form(make, store, rank, size, stages, in_order=in_order)

    @classmethod
    def form(
        cls,
        make: MakeGroup,
        store: Any,
        rank: int,
        size: int,
        stages: int = 1,
        *,
        in_order: bool = False,
    ) -> ProcessGroup:
        """Form the group of all ranks, and those of stages with several ranks, over a store."""
        whole = cls(make(store, rank, size), rank, size, in_order=in_order)
        if stages > 1:
            stage = Stage.of(rank, size, stages)
            own = _c10d.PrefixStore(f"stage {stage.number}", store)
            place, width = stage.place, stage.width
            whole.parts = None
            if width > 1:
                whole.parts = cls(make(own, place, width), place, width, in_order=in_order)
        return whole

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Skip communication within the block: collectives return their inputs unchanged."""
        group, self._group = self._group, _Nobody()
        parts = self.parts if self.parts is not self else None
        try:
            with nullcontext() if parts is None else parts.rehearsing():
                yield
        finally:
            self._group = group

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """All-reduce: return the sum of all ranks' `x`, bit-identical on each; overwrites `x`.

        A library adds up pieces of a message in orders that follow its size, so a row's sum may
        differ with the number of rows. `in_order`, parts are gathered, and added in float32.
        """
        x = x.contiguous()
        if self._in_order:
            first, *others = self._gather(x)
            total = first.float()
            for part in others:
                total = total + part
            return x.copy_(total)
        self._group.allreduce([x], _at_once(_c10d.AllreduceOptions())).wait()
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """All-gather: return all ranks' `x` [..., n] joined in rank order: [..., size * n]."""
        return self._gather(x.contiguous()).movedim(0, -2).flatten(-2)

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return all ranks' contiguous `x`, in rank order: [size, ...]."""
        parts = x.new_empty((self.size * len(x), *x.shape[1:]))
        options = _at_once(_c10d.distributed_c10d.AllgatherOptions())
        self._group._allgather_base(parts, x, options).wait()
        return parts.view(self.size, *x.shape)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Broadcast: return rank 0's `x`, contiguous and of one shape; overwrites the others'."""
        self._group.broadcast([x], _at_once(_c10d.BroadcastOptions())).wait()
        return x

    def send(self, x: torch.Tensor, to: int) -> None:
        """Send `x`, which must not change, to a rank; waits for the previous send to complete."""
        x = x.contiguous()
        sending, self._sending = self._sending, (x, self._group.send([x], to, 0))
        if sending is not None:
            sending[1].wait()

    def receive(self, x: torch.Tensor, sender: int) -> torch.Tensor:
        """Receive into `x` the next tensor that a rank sends, of the same shape; returns it."""
        self._group.recv([x], sender, 0).wait()
        return x

    def least(self, value: int, device: torch.device) -> int:
        """Return the minimum of all ranks' `value`s."""
        options = _at_once(_c10d.AllreduceOptions())
        options.reduceOp = _c10d.ReduceOp.MIN
        numbers = torch.full((1,), value, dtype=torch.int64, device=device)
        self._group.allreduce([numbers], options).wait()
        return int(numbers)


class _Nobody:
    """A group without communication."""

    def allreduce(self, tensors: object, options: object) -> _Nobody:
        return self

    def broadcast(self, tensors: object, options: object) -> _Nobody:
        return self

    def _allgather_base(self, parts: object, own: object, options: object) -> _Nobody:
        return self

    def send(self, tensors: object, to: int, tag: int) -> _Nobody:
        return self

    def recv(self, tensors: object, sender: int, tag: int) -> _Nobody:
        return self

    def wait(self) -> None:
        return None


def _at_once(options: Any) -> Any:
    """Run a collective in the computing stream rather than in one of its own."""
    options.asyncOp = False
    return options


def nccl_group(store: Any, rank: int, size: int) -> Any:
    """Return a process group of the ranks' current CUDA devices, which meet at a store."""
    options = _c10d.ProcessGroupNCCL.Options()
    options._timeout = _TIMEOUT
    return _c10d.ProcessGroupNCCL(store, rank, size, options)


def gloo_group(store: Any, rank: int, size: int, address: str = "") -> Any:
    """Return a process group whose ranks meet at one of torch's stores.

    `address`: of this machine, which the others reach this rank at; "": over loopback.
    """
    options = _c10d.ProcessGroupGloo._Options()
    at = {"hostname": address} if address else {"interface": "lo"}
    options._devices = [_c10d.ProcessGroupGloo.create_device(**at)]
    options._timeout = _TIMEOUT
    options._threads = 1  # collectives run one after the other; more threads would be useless
    return _c10d.ProcessGroupGloo(store, rank, size, options)
