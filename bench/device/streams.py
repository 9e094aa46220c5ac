"""Streams of a server, read by several processes: one alone would be what is measured.

Reading a token takes one of ours a tenth of a millisecond, which at 64 streams is what a step
takes.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import trio

from tgi_trio.client.address import Address
from tgi_trio.client.http import Client
from tgi_trio.client.load import Load, Work, records_of
from tgi_trio.client.measures import RequestRecord

_MOST: Final = 4  # processes


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

    def __init__(self, pool: ProcessPoolExecutor, address: Address, clients: int) -> None:
        self._pool = pool
        self._address = address
        self._clients = clients
        self._each = [len(range(i, clients, _MOST)) for i in range(min(_MOST, clients))]

    def read(self, words: int, tokens: int, *, rounds: int = 1, seed: int = 0) -> Heard:
        """Have each client ask `rounds` times, one request after the other; return what it heard.

        Prompts of `words` words are those of the seed: asked for again, they are in the cache.
        """
        began = time.perf_counter()
        asked = [
            self._pool.submit(
                _read, self._address, count, Work(rounds * count, words, tokens, seed * _MOST + i)
            )
            for i, count in enumerate(self._each)
        ]
        told = [each.result() for each in asked]
        records = [record for own, _ in told for record in own]
        return Heard(records, began, time.perf_counter(), [share for _, share in told])


@contextmanager
def readers(address: Address, clients: int) -> Iterator[Readers]:
    """Yield processes that read the streams of `clients` clients."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(_MOST, clients), context) as pool:
        yield Readers(pool, address, clients)


def _read(address: Address, clients: int, work: Work) -> tuple[list[RequestRecord], float]:
    """Read the streams of some clients; return their records and the processor's share."""

    async def read() -> list[RequestRecord]:
        shift = time.perf_counter() - trio.current_time()
        found = await records_of(Client(address), Load("closed", clients), work, lambda: None)
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
