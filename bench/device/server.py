"""The whole server over a bare step of the same model, and over a device that breaks."""

from __future__ import annotations

import json
import random
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from bench.device.random_server import write_folder
from bench.device.streams import Heard, processor_seconds, read_until, readers
from bench.device.timed_steps import Table, describe, read_steps
from bench.harness.server import Server, serving
from tgi_trio.client.address import Address
from tgi_trio.client.load import prompt
from tgi_trio.client.measures import Summary
from tgi_trio.testing.ports import reserve_port

_START_S: Final = 300.0
_TRIES: Final = 5
_BROKEN_STREAMS: Final = 8
_BREAK_AT: Final = 20  # steps of all streams; the warm-up launches none
_TOLD: Final = 8192  # bytes of what a server said that has failed
_PHASES: Final = re.compile(r"start-up: (.*)")  # in a server's log


def measure_server(
    shape: str, folder: Path, clients: int, context: int, tokens: int, flags: list[str]
) -> dict[str, Any]:
    """Serve a shape with random weights to `clients` that each want `tokens`; return the figures.

    First all stream at once, from prompts that are in the cache already: `step_ms` is the median
    between two tokens while every client's stream runs. Then, as `fresh`, come two rounds of
    prompts that nobody has seen, which are computed beside the streams. Prompts are such that
    sequences have `context` tokens on the average, as those of bare steps.
    """
    steps = folder / "steps.json"
    steps.unlink(missing_ok=True)
    with _serving(shape, folder, {"steps": str(steps)}, flags) as served:
        with readers(Address(served.server.host, served.server.port), clients) as own:
            words = count_words(folder, max(8, context - tokens // 2))
            own.read(words, 1)
            with served.timed():
                steady = read_until(lambda: own.read(words, tokens), Heard.ran_at_once)
            fresh = own.read(words, tokens, rounds=2, seed=1)
    table, warm_up = read_steps(steps)
    began, ended = steady.window()
    gaps = Summary.of(steady.gaps(began, ended))
    found: dict[str, Any] = {
        "what": f"server, {clients} clients",
        "ready_s": served.server.ready_s,
        "start": served.phases | warm_up,
        "step_ms": gaps.p50 * 1e3,
        "p99_ms": gaps.p99 * 1e3,
        "window_s": ended - began,
        "steady": describe(table, began, ended, clients),
        "processors": served.shares | {"readers": steady.shares},
        "fresh": _describe_fresh(fresh, table, clients),
        "errors": sorted({r.error for r in (*steady.records, *fresh.records) if r.error}),
    }
    if not gaps.n:
        found["why"] = "there was no time in which all streams ran"
    return found


def _describe_fresh(heard: Heard, table: Table, clients: int) -> dict[str, Any]:
    """Return what prompts beside streams came to."""
    gaps = Summary.of(heard.gaps(heard.began, heard.ended))
    first = Summary.of([record.ttft for record in heard.records if record.events])
    tokens = sum(record.tokens for record in heard.records)
    return {
        "step_ms": gaps.p50 * 1e3,
        "p99_ms": gaps.p99 * 1e3,
        "ttft_ms": first.p50 * 1e3,
        "ttft_p99_ms": first.p99 * 1e3,
        "tokens_per_s": tokens / (heard.ended - heard.began),
        **describe(table, heard.began, heard.ended, clients),
    }


def measure_break(shape: str, folder: Path, tokens: int, flags: list[str]) -> dict[str, Any]:
    """Have the device of a shard break under streams; return how many got all their tokens.

    `step_ms`: from the break until the last of them went on. A stream that it did not interrupt,
    or that lost tokens by it, is the row's failure. Where only a reader came too late to see its
    stream stop, as on a busy machine, all of it is done again, a few times.
    """
    found = _break_once(shape, folder, tokens, flags)
    for _ in range(_TRIES - 1):
        if found["completed"] < _BROKEN_STREAMS or found.get("missed", 0) == 0:
            break
        found = _break_once(shape, folder, tokens, flags)
    return found


def _break_once(shape: str, folder: Path, tokens: int, flags: list[str]) -> dict[str, Any]:
    broken = folder / "broken"
    broken.unlink(missing_ok=True)
    at = min(_BREAK_AT, tokens // 4)
    options = {"break_at": at, "break_rows": _BROKEN_STREAMS, "broken": str(broken)}
    with _serving(shape, folder, options, flags) as served:
        with readers(Address(served.server.host, served.server.port), _BROKEN_STREAMS) as own:
            own.read(8, 1)  # its processes take seconds to start, each its own time
            heard = read_until(lambda: own.read(8, tokens), lambda _: broken.exists())
    found: dict[str, Any] = {
        "what": "a device that breaks under streams",
        "broken": broken.exists(),
        "streams": _BROKEN_STREAMS,
        "completed": sum(r.tokens == tokens and not r.error for r in heard.records),
        "errors": sorted({r.error for r in heard.records if r.error}),
        "said": served.last_words(),
    }
    if not broken.exists():
        return found | {"why": "the device was not broken"}
    at_s = float(broken.read_text())
    whole = [r.events for r in heard.records if not r.error]  # others may have had a pause, too
    ends = [end for events in whole if (end := went_on(events, at_s)) is not None]
    found |= {"interrupted": len(ends), "pauses_s": [round(end - at_s, 3) for end in sorted(ends)]}
    found["missed"] = len(whole) - len(ends)
    if ends:
        found["step_ms"] = (max(ends) - at_s) * 1e3
    if len(ends) < _BROKEN_STREAMS or found["completed"] < _BROKEN_STREAMS:
        found["why"] = "not every stream was interrupted by it and went on to its end"
    elif not found["said"]:
        found["why"] = "no shard has ended: nothing was broken"
    return found


def went_on(events: list[float], broken: float) -> float | None:
    """Return when a stream went on that was interrupted at `broken`: its longest pause ended.

    None where no token came before, or none afterwards.
    """
    if not events or not events[0] < broken < events[-1]:
        return None
    before, after = max(pairwise(events), key=lambda pair: pair[1] - max(broken, pair[0]))
    return after if after > max(before, broken) else None


def count_words(folder: Path, tokens: int) -> int:
    """Return how many words a prompt of about `tokens` tokens has."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    words = 200
    each = len(tokenizer.encode(prompt(random.Random(0), words)).ids) / words
    return max(1, round(tokens / each))


@dataclass(slots=True)
class _Served:
    """A server that runs, and what was seen of it."""

    server: Server
    log: Path
    shares: dict[str, float] = field(default_factory=dict)  # of a processor, by process

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Note which part of a processor each process takes that is there during the block."""
        pids = {"router": self.server.pid}
        children = Path(f"/proc/{self.server.pid}/task/{self.server.pid}/children")
        for number, child in enumerate(children.read_text().split()):
            pids[f"child {number}"] = int(child)
        before, began = _spent_by(pids), time.perf_counter()
        yield
        spent, took = _spent_by(pids), time.perf_counter() - began
        for name in before.keys() & spent:
            self.shares[name] = (spent[name] - before[name]) / took

    @property
    def phases(self) -> dict[str, float]:
        """What its log says of the start, in seconds."""
        told = _PHASES.search(self.log.read_text(errors="replace"))
        phases = [] if told is None else [each.rsplit(" ", 2) for each in told[1].split(", ")]
        return {name: float(seconds) for name, seconds, _ in phases}

    def last_words(self) -> list[str]:
        """What shards said that could not go on."""
        lines = self.log.read_text(errors="replace").splitlines()
        return [
            line.strip()[:300] for line in lines if "| shard" in line and "cannot go on" in line
        ]


def _spent_by(pids: dict[str, int]) -> dict[str, float]:
    """Return the processor time of each process so far, without those that have ended."""
    found: dict[str, float] = {}
    for name, pid in pids.items():
        with suppress(OSError):
            found[name] = processor_seconds(pid)
    return found


@contextmanager
def _serving(
    shape: str, folder: Path, options: dict[str, Any], flags: list[str]
) -> Iterator[_Served]:
    """Serve a shape on a port of its own."""
    write_folder(shape, folder)
    told = json.dumps({"shape": shape} | options)
    argv = [sys.executable, "-m", "bench.device.random_server", told, "--model-id", str(folder)]
    with reserve_port() as port, (folder / "log.txt").open("w+b") as log:
        command = [*argv, "--hostname", "127.0.0.1", "--port", str(port), *flags]
        try:
            with serving(command, port, output=log, timeout=_START_S) as server:
                yield _Served(server, folder / "log.txt")
        except BaseException:
            log.seek(0)
            print(log.read()[-_TOLD:].decode(errors="replace"), file=sys.stderr)
            raise
