"""Soak: many short requests, and memory, descriptors and threads while they pass.

    python -m tests.stress.soak --requests 200000            # a shard without a model
    python -m tests.stress.soak --minutes 20 --demo          # the embedded one, clients come and go
    python -m tests.stress.soak --minutes 20 --model-id FOLDER  # any model

What counts is the slope: a least-squares line through the memory of the second half, when caches
and pools have filled. A leak of one small object per request shows as 50 bytes a request or more.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import trio
from tqdm import tqdm

from bench.harness import stats
from bench.harness.server import Server, running
from bench.harness.vitals import Vitals, cpu_seconds, find_shards, vitals

# A KV cache so small that it has filled, and its pages are in memory, before the second half.
FLAGS = ("--max-concurrent-requests", "64", "--max-batch-total-tokens", "8192")

PERIOD = 1.0  # seconds between two readings

BROKEN_OFF = 0.02  # share of streams whose client leaves
STREAMS = 0.5


@dataclass
class Reading:
    """One moment of the server."""

    seconds: float
    requests: int
    router: Vitals
    shard: Vitals


@dataclass
class Soak:
    """A run under way."""

    server: Server
    rng: random.Random
    max_tokens: int
    done: int = 0
    failures: Counter[int] = field(default_factory=Counter)  # by status
    readings: list[Reading] = field(default_factory=list)


class Connection:
    """One keep-alive connection that reads no more of an answer than its end."""

    def __init__(self, stream: trio.SocketStream, headers: str = "") -> None:
        """`headers`: lines that every request has, each with its end."""
        self._stream = stream
        self._headers = headers
        self._buffer = b""
        self.body = b""  # of the last answer, where it was no stream

    async def _until(self, mark: bytes) -> bytes:
        while mark not in self._buffer:
            more = await self._stream.receive_some(65536)
            if not more:
                raise OSError("the server closed the connection")
            self._buffer += more
        found, self._buffer = self._buffer.split(mark, 1)
        return found

    async def ask(self, path: str, body: dict[str, Any], leave_early: bool) -> int:
        """Send one request, read its answer and return its status; 0 when left early."""
        payload = orjson.dumps(body)
        head = (
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"content-length: {len(payload)}\r\n{self._headers}\r\n"
        )
        await self._stream.send_all(head.encode() + payload)
        found = (await self._until(b"\r\n\r\n")).lower()
        if leave_early:
            return 0
        if b"\r\ntransfer-encoding: chunked" in found:
            await self._until(b"0\r\n\r\n")
        else:
            length = int(found.split(b"content-length:")[1].split(b"\r\n")[0])
            while len(self._buffer) < length:
                self._buffer += await self._stream.receive_some(65536)
            self.body, self._buffer = self._buffer[:length], self._buffer[length:]
        return int(found.split()[1])


async def client(soak: Soak, more: Callable[[], bool]) -> None:
    """Send short requests, some as streams, some left early, until there is no `more`."""
    while more():
        # Clients come and go: a connection carries up to a hundred requests.
        async with await trio.open_tcp_stream(soak.server.host, soak.server.port) as stream:
            connection = Connection(stream)
            for _ in range(soak.rng.randint(1, 100)):
                if not more():
                    return
                soak.done += 1
                left = await one(soak, connection)
                if left:
                    break


async def one(soak: Soak, connection: Connection) -> bool:
    """Send one request; return whether its client left."""
    rng = soak.rng
    prompt = f"What is {rng.randrange(10**6)}?"
    body = {"inputs": prompt, "parameters": {"max_new_tokens": rng.randint(1, soak.max_tokens)}}
    streamed = rng.random() < STREAMS
    leaves = streamed and rng.random() < BROKEN_OFF
    status = await connection.ask("/generate_stream" if streamed else "/generate", body, leaves)
    if status not in (0, 200):
        soak.failures[status] += 1
    return leaves


async def watch(soak: Soak, pids: tuple[int, int], bar: tqdm[Any], whole: float) -> None:
    """Read the vitals every second."""
    start = time.monotonic()
    while True:
        seconds = time.monotonic() - start
        router, shard = (vitals(pid) for pid in pids)
        soak.readings.append(Reading(seconds, soak.done, router, shard))
        bar.n = min(seconds if bar.unit == "s" else soak.done, whole)
        bar.refresh()
        await trio.sleep(PERIOD)


async def run(soak: Soak, args: argparse.Namespace, pids: tuple[int, int]) -> None:
    """Run the clients until the requests or the minutes are over."""
    end = time.monotonic() + args.minutes * 60 if args.minutes else float("inf")
    most = args.requests if not args.minutes else 10**12
    whole = args.minutes * 60 or args.requests
    with tqdm(total=whole, unit="s" if args.minutes else "req", desc="soak") as bar:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch, soak, pids, bar, whole)
            async with trio.open_nursery() as clients:
                for _ in range(args.clients):
                    clients.start_soon(
                        client, soak, lambda: soak.done < most and time.monotonic() < end
                    )
            nursery.cancel_scope.cancel()


def slope(readings: list[Reading], value: Callable[[Reading], float]) -> float:
    """Return the growth of a value per request, by least squares over the second half."""
    half = readings[len(readings) // 2 :]
    if len(half) < 2:
        return 0.0
    at = np.array([reading.requests for reading in half], dtype=float)
    return float(np.polyfit(at, [value(reading) for reading in half], 1)[0])


def summary(soak: Soak) -> dict[str, Any]:
    """Return what the table shows."""
    first, last = soak.readings[len(soak.readings) // 2], soak.readings[-1]
    result: dict[str, Any] = {
        "requests": soak.done,
        "failures": dict(soak.failures),
        "seconds": last.seconds,
        "requests_per_s": soak.done / max(last.seconds, PERIOD),
    }
    for name in ("router", "shard"):
        result[name] = {
            "rss_mib_at_half": getattr(first, name).rss / 2**20,
            "rss_mib_at_end": getattr(last, name).rss / 2**20,
            "bytes_per_request": slope(soak.readings, partial(resident_bytes, name)),
            "descriptors": [getattr(each, name).descriptors for each in (first, last)],
            "most_descriptors": max(getattr(each, name).descriptors for each in soak.readings),
            "threads": [getattr(each, name).threads for each in (first, last)],
        }
    return result


def main() -> None:
    """Parse flags, soak, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--minutes", type=float, default=0, help="by the clock instead")
    served = parser.add_mutually_exclusive_group()
    served.add_argument("--demo", action="store_true", help="serve the embedded model")
    served.add_argument("--model-id", help="serve the model in this folder")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument(
        "--settle", type=float, default=12.0, help="seconds; trio ends idle threads after ten"
    )
    parser.add_argument(
        "--idle",
        type=float,
        default=10.0,
        help="seconds in which processor time is counted",
    )
    stats.add_output_flags(parser)
    args = parser.parse_args()
    flags = (*FLAGS, "--model-id", args.model_id) if args.model_id else FLAGS
    with running(flags, fake=None if args.demo or args.model_id else "{}") as server:
        (shard,) = find_shards(server.pid)
        pids = {"router": server.pid, "shard": shard}
        soak = Soak(server, random.Random(0), args.max_tokens)
        after: dict[str, dict[str, Any]] = {}
        with stats.reporting(args.json, "stress.soak", partial(report, args, soak, after)):
            trio.run(run, soak, args, (server.pid, shard))
            time.sleep(args.settle)
            used = {name: cpu_seconds(pid) for name, pid in pids.items()}
            time.sleep(args.idle)
            for name, pid in pids.items():
                idle = (cpu_seconds(pid) - used[name]) / args.idle
                after[name] = {**asdict(vitals(pid)), "idle_cores": idle}


def resident_bytes(name: str, reading: Reading) -> int:
    """Return the memory of one of the processes at a reading."""
    vitals: Vitals = getattr(reading, name)
    return vitals.rss


def report(
    args: argparse.Namespace, soak: Soak, after: dict[str, dict[str, Any]]
) -> tuple[str, dict[str, Any]]:
    """Return the table, and what is written; `after` is empty before everybody has left."""
    result = summary(soak)
    rows = []
    for name in ("router", "shard"):
        own, rest = result[name], after.get(name, {})
        threads = f"{own['threads'][0]} to {own['threads'][1]}"
        idle = 100 * rest["idle_cores"] if rest else "-"
        memory = own["rss_mib_at_half"], own["rss_mib_at_end"], own["bytes_per_request"]
        rows.append((name, *memory, rest.get("descriptors", "-"), threads, idle))
    header = (
        *("process", "MiB at half", "MiB at end", "bytes a request", "fds after", "threads"),
        "idle % of a core",
    )
    words = (
        f"{result['requests']} requests in {result['seconds']:.0f} s "
        f"({result['requests_per_s']:.0f}/s), failed: {result['failures'] or 'none'}"
    )
    model = "embedded" if args.demo else args.model_id or "none"
    document = {"model": Path(model).name, **result, "after": after}
    return f"{stats.table(header, rows)}\n{words}", document


if __name__ == "__main__":
    main()
