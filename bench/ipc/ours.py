"""Our channel in the ways it is used: both ends spinning, an event loop, both asleep."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import trio

from bench.ipc.sampling import IDLE_S, Budget, Case, Placement, Row, cases, summarise
from tgi_trio.ipc.endpoints import Endpoints
from tgi_trio.ipc.router_end import ReplyBell, RouterEnd
from tgi_trio.ipc.spawn import spawn_shard


@dataclass(frozen=True)
class Variant:
    """How long each side stays awake before it sleeps; microseconds."""

    name: str
    router_spin: int = 0
    router_poll: int = 0
    shard_spin: int = 50


VARIANTS = (
    Variant("ring, both spin", router_spin=50),
    Variant("ring, event loop", router_poll=50),
    Variant("ring, router sleeps"),
    Variant("ring, both sleep", shard_spin=0),
)


@contextmanager
def channel(variant: Variant, core: int, program: tuple[str, ...] = ()) -> Iterator[RouterEnd]:
    """Start an echoing shard on `core` (-1: anywhere) and yield the router's end."""
    with (
        ReplyBell(spin_us=variant.router_spin, poll_us=variant.router_poll) as bell,
        Endpoints.create(0, 1, reply_bell=bell.fd, spin_us=variant.shard_spin) as endpoints,
        RouterEnd(endpoints, bell) as end,
    ):
        command = program or ("bench.ipc.echo", "ring", str(core))
        with spawn_shard([sys.executable, "-m", *command, endpoints.spec.text()], endpoints):
            endpoints.release_child_ends()
            yield end


def measure(variant: Variant, place: Placement, budget: Budget) -> list[Row]:
    """Return the variant's rows."""

    async def main() -> list[Row]:
        with channel(variant, place.peer) as end:
            await round_trips(end, Case("hot", 64, place.pinned), Budget(50, 5.0, 0))
            return [
                summarise(variant.name, case, await round_trips(end, case, budget))
                for case in cases(place.pinned)
            ]

    return trio.run(main)


async def round_trips(end: RouterEnd, case: Case, budget: Budget) -> list[int]:
    """Time round trips as the engine makes them; the reply is read where it lies."""
    message = case.message()
    clock = time.perf_counter_ns
    try_send, try_receive, wait, release = end.try_send, end.try_receive, end.bell.wait, end.release
    elapsed = []
    for _ in budget.rounds(case):
        if case.mode == "idle":
            await trio.sleep(IDLE_S)
        start = clock()
        try_send(message)
        while try_receive() is None:
            await wait()
        release()
        elapsed.append(clock() - start)
    return elapsed
