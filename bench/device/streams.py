"""Streams of a server, read by several processes: one alone would be what is measured.

Reading a token takes one of ours a tenth of a millisecond, which at 64 streams is what a step
takes.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import trio

from tgi_trio.client.address import Address
from tgi_trio.client.http import Client
from tgi_trio.client.load import Load, Work, run_load
from tgi_trio.client.measures import RequestRecord

_MOST: Final = 4  # processes
_TRIES: Final = 5


@dataclass(frozen=True, slots=True)
class Heard:
    """What was heard of a load; times in seconds of `perf_counter`, one clock for all."""

    records: list[RequestRecord]
    began: float
    ended: float
    shares: list[float]  # of a processor that each reader took

    def window(self) -> tuple[float, float]:
        """Return when the last stream began and when the first one ended.

        In between all are read; there is no such time where the second is the smaller.
        """
        whole = [record.events for record in self.records if record.events]
        return max(each[0] for each in whole), min(each[-1] for each in whole)

    def ran_at_once(self) -> bool:
        """Return whether there was a time in which all streams ran, two tokens of one in it."""
        return bool(self.gaps(*self.window()))

    def gaps(self, began: float, ended: float) -> list[float]:
        """Return the seconds between every two tokens of a stream that came in a time."""
        return [
            after - before
            for record in self.records
            for before, after in pairwise(record.events)
            if began <= before and after <= ended
        ]


class Readers:
    """Processes that read streams of one server."""

    def __init__(
        self, processes: list[ProcessPoolExecutor], address: Address, clients: int
    ) -> None:
        # A pool for each process: of two in one pool, the first that had started would read the
        # streams of both, one after the other.
        self._processes = processes
        self._address = address
        self._each = [len(range(i, clients, len(processes))) for i in range(len(processes))]

    def read(self, words: int, tokens: int, *, rounds: int = 1, seed: int = 0) -> Heard:
        """Have each client ask `rounds` times, one request after the other; return what it heard.

        Prompts of `words` words are those of the seed: asked for again, they are in the cache.
        """
        began = time.perf_counter()
        asked = [
            process.submit(
                _read, self._address, count, Work(rounds * count, words, tokens, seed * _MOST + i)
            )
            for i, (process, count) in enumerate(zip(self._processes, self._each, strict=True))
        ]
        told = [each.result() for each in asked]
        records = [record for own, _ in told for record in own]
        return Heard(records, began, time.perf_counter(), [share for _, share in told])


@contextmanager
def readers(address: Address, clients: int) -> Iterator[Readers]:
    """Yield processes that read the streams of `clients` clients."""
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        count = min(_MOST, clients)
        pools = [stack.enter_context(ProcessPoolExecutor(1, context)) for _ in range(count)]
        yield Readers(pools, address, clients)


def read_until(read: Callable[[], Heard], done: Callable[[Heard], bool]) -> Heard:
    """Read until what was heard will do, five times at most; return the last that was heard.

    Where a machine is busy, one stream can be at its end before another one begins.
    """
    heard = read()
    for _ in range(_TRIES - 1):
        if done(heard):
            break
        heard = read()
    return heard


def _read(address: Address, clients: int, work: Work) -> tuple[list[RequestRecord], float]:
    """Read the streams of some clients; return their records and the processor's share."""

    async def read() -> list[RequestRecord]:
        shift = time.perf_counter() - trio.current_time()
        found = await run_load(Client(address), Load("closed", clients), work, lambda: None)
        for record in found:
            record.start += shift
            record.events = [at + shift for at in record.events]
        return found

    began, spent = time.perf_counter(), time.process_time()
    records = trio.run(read)
    return records, (time.process_time() - spent) / (time.perf_counter() - began)


def processor_seconds(pid: int) -> float:
    """Return the processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
