"""The parts of a channel, and how a child process gets them: descriptors and a spec as text."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass

from tgi_trio.ipc import layout
from tgi_trio.ipc.control import ControlPage
from tgi_trio.ipc.fence import Ordering
from tgi_trio.ipc.litmus import prove_ordering
from tgi_trio.ipc.segment import Segment

DEFAULT_RING_BYTES = 2 * 2**20


@dataclass(frozen=True)
class ChannelSpec:
    """What an end needs to attach: text on the command line; `fds` are inherited (`pass_fds`)."""

    segment: int  # descriptors
    request_bell: int
    reply_bell: int
    death: int  # read end of the death pipe, -1 when there is none
    rank: int
    router_pid: int
    ordering: str  # fence.Ordering.name, chosen once by the router's self-test
    spin_us: int  # how long the blocking reader spins before it sleeps
    full_timeout_ms: int  # how long a writer waits for a reader that makes no room

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptors that the child must inherit."""
        everything = (self.segment, self.request_bell, self.reply_bell, self.death)
        return tuple(fd for fd in everything if fd >= 0)

    def text(self) -> str:
        """Return the spec as one word without spaces."""
        return ",".join(f"{name}={value}" for name, value in vars(self).items())

    @classmethod
    def parse(cls, text: str) -> ChannelSpec:
        """Parse what `text()` returns. Raises ValueError."""
        pairs = dict(item.partition("=")[::2] for item in text.split(","))
        names = tuple(cls.__dataclass_fields__)
        if tuple(pairs) != names:
            raise ValueError(f"channel spec {text!r}; expected the fields {', '.join(names)}")
        ordering = pairs.pop("ordering")
        return cls(ordering=ordering, **{name: int(value) for name, value in pairs.items()})


class Endpoints:
    """All parts of one channel, created by the router. A context manager.

    `spec` is for the child; after the spawn `release_child_ends()` closes what only the child
    needs. The write end of the death pipe stays open as long as the router lives.
    """

    def __init__(self, page: ControlPage, spec: ChannelSpec, death_write: int, bell: int) -> None:
        """Take over all descriptors; `bell` is the reply eventfd when nobody else owns it."""
        self.page = page
        self.spec = spec
        self._own = {spec.request_bell, spec.death, death_write, bell} - {-1}

    @classmethod
    def create(
        cls,
        rank: int,
        incarnation: int,
        *,
        reply_bell: int = -1,
        request_bytes: int = DEFAULT_RING_BYTES,
        reply_bytes: int = DEFAULT_RING_BYTES,
        ordering: Ordering | None = None,
        spin_us: int = 50,
        full_timeout: float = 30.0,
    ) -> Endpoints:
        """Create segment, eventfds and death pipe; `reply_bell` shares an existing eventfd.

        Sizes in bytes, powers of two. `ordering` None: the one that passes the litmus test on this
        machine. Raises SegmentError if there is no memory.
        """
        layout.check_ring_bytes("request_bytes", request_bytes)
        layout.check_ring_bytes("reply_bytes", reply_bytes)
        ordering = ordering or prove_ordering()
        size = layout.CONTROL_BYTES + request_bytes + reply_bytes
        with (
            ExitStack() as undo
        ):  # until everything is there: running out of descriptors is possible
            segment = undo.enter_context(Segment.create(size, label=f"channel of rank {rank}"))
            page = ControlPage.format(segment, rank, incarnation, request_bytes, reply_bytes)
            death_read, death_write = os.pipe2(os.O_CLOEXEC)
            for end in (death_read, death_write):
                undo.callback(os.close, end)
            request_bell = _new_bell()
            undo.callback(os.close, request_bell)
            own_bell = _new_bell() if reply_bell < 0 else -1
            undo.pop_all()
        spec = ChannelSpec(
            segment=segment.fd,
            request_bell=request_bell,
            reply_bell=own_bell if reply_bell < 0 else reply_bell,
            death=death_read,
            rank=rank,
            router_pid=os.getpid(),
            ordering=ordering.name,
            spin_us=spin_us,
            full_timeout_ms=round(full_timeout * 1000),
        )
        return cls(page, spec, death_write, own_bell)

    def release_child_ends(self) -> None:
        """Close the descriptors that only the child uses; call after the spawn."""
        self._close({self.spec.death})

    def close(self) -> None:
        """Close everything, the death pipe included: a child that still lives ends itself."""
        self._close(set(self._own))
        self.page.segment.close()

    def _close(self, fds: set[int]) -> None:
        for fd in fds & self._own:
            os.close(fd)
        self._own -= fds

    def __enter__(self) -> Endpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _new_bell() -> int:
    # Both directions are non-blocking: O_NONBLOCK belongs to the open file, which both processes
    # share, and a blocking write to an eventfd that the peer has filled would never return.
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
