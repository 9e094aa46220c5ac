"""What is measured: cases, how one is sampled, and what becomes of the samples."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

ECHO, WORK = b"e", b"w"  # first byte of a payload: send it back at once, or after WORK_NS of work
WORK_NS = 3_000_000
IDLE_S = 0.003  # pause before a send, after which both sides sleep
PAYLOADS = (64, 1024, 16384, 262144)


@dataclass(frozen=True)
class Case:
    """One row of the table, for any transport.

    `hot`: back to back. `idle`: 3 ms of silence before each send. `work`: the peer computes for
    exactly 3 ms, which is taken off; what is left is the dispatch overhead of a decode step.
    """

    mode: str
    payload: int
    pinned: bool

    def message(self) -> bytes:
        return (WORK if self.mode == "work" else ECHO) + bytes(self.payload - 1)


@dataclass(frozen=True)
class Row:
    """A measured case; microseconds."""

    transport: str
    mode: str
    payload: int
    pinned: bool
    samples: int
    p50: float
    p99: float
    p99_9: float


@dataclass(frozen=True)
class Budget:
    """How much to measure per case."""

    hot_samples: int
    hot_seconds: float
    slow_samples: int  # idle and work: each takes 3 ms anyway

    def rounds(self, case: Case) -> Iterator[None]:
        """Yield once per sample until the case's samples or seconds are used up."""
        if case.mode != "hot":
            for _ in range(self.slow_samples):
                yield
            return
        deadline = time.perf_counter() + self.hot_seconds
        for _ in range(self.hot_samples):
            yield
            if time.perf_counter() > deadline:
                return


def cases(pinned: bool) -> list[Case]:
    """Return all cases: hot at every payload, idle and work at 1 KiB."""
    hot = [Case("hot", payload, pinned) for payload in PAYLOADS]
    return [*hot, Case("idle", 1024, pinned), Case("work", 1024, pinned)]


def summarise(transport: str, case: Case, nanoseconds: list[int]) -> Row:
    """Return the row; the first fifth of the samples is warm-up and left out."""
    kept = np.array(nanoseconds[len(nanoseconds) // 5 :], dtype=float) / 1000
    if case.mode == "work":
        kept -= WORK_NS / 1000
    p50, p99, p99_9 = (round(float(v), 2) for v in np.percentile(kept, (50, 99, 99.9)))
    return Row(transport, case.mode, case.payload, case.pinned, len(kept), p50, p99, p99_9)


async def sample(
    call: Callable[[bytes], Awaitable[object]],
    sleep: Callable[[float], Awaitable[object]],
    case: Case,
    budget: Budget,
) -> list[int]:
    """Time `call` for one case; nanoseconds."""
    message = case.message()
    clock = time.perf_counter_ns
    elapsed = []
    for _ in budget.rounds(case):
        if case.mode == "idle":
            await sleep(IDLE_S)
        start = clock()
        await call(message)
        elapsed.append(clock() - start)
    return elapsed


@dataclass(frozen=True)
class Placement:
    """Which cores the two sides run on; -1 leaves it to the scheduler."""

    router: int
    peer: int

    @classmethod
    def choose(cls, pinned: bool) -> Placement:
        """Return the first two cores this process may use, or no cores at all."""
        allowed = sorted(os.sched_getaffinity(0))
        return cls(allowed[0], allowed[1 % len(allowed)]) if pinned else cls(-1, -1)

    @property
    def pinned(self) -> bool:
        return self.router >= 0

    @contextmanager
    def here(self) -> Iterator[None]:
        """Run the block on the router's core."""
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {self.router} if self.pinned else before)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)


def work() -> None:
    """Compute for WORK_NS."""
    end = time.perf_counter_ns() + WORK_NS
    while time.perf_counter_ns() < end:
        continue
