"""How long `/live` takes to answer: while nothing happens, and under loads.

    python -m bench.http.live --json bench/out/live.json

An orchestrator ends a server whose `/live` is late, so what counts is the 99th percentile. The
floor is a loop in a process of its own that answers every request with the same bytes: what it is
late by is the machine's doing. Both are asked in turns, under the same load, over connections that
stay open. The goal is meant for a machine where nothing else runs: the load average before is
printed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

from tqdm import tqdm

from bench.harness.server import Server, running
from bench.harness.stats import Summary, add_output_flags, reporting, table
from bench.http import load_generator
from tgi_trio.testing.ports import reserve_port

GOAL_MS = 5.0  # 99th percentile
_RECEIVE = 1 << 16
_START_S = 240.0  # seconds a load, or the floor, may take to be there
_REQUEST = b"GET /live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
_ANSWER = (
    b'HTTP/1.1 200 OK\r\ncontent-length: 13\r\ncontent-type: application/json\r\n\r\n{"live":true}'
)


@dataclass(frozen=True)
class Case:
    """A server, and what it is doing meanwhile."""

    name: str  # with a hole for the streams
    streams: int  # open at any time; an answer that ends is followed by the next
    tokens: int = 800  # of each answer
    flags: Sequence[str] = ()
    fake: str | None = None  # FakeSettings as JSON, for a shard without a model


CASES = (
    Case("nothing", 0),
    Case("{} streams, embedded model", 64),
    Case(
        "{} streams of 100 tokens/s, no model",
        512,
        flags=("--max-concurrent-requests", "1024"),
        fake='{"step_ms": 10, "blocks": 40000}',
    ),
)


class Probe:
    """Asks one server over one connection."""

    def __init__(self, port: int) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port), 30)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self) -> float:
        """Return the milliseconds to the whole answer; raises RuntimeError when it is not 200."""
        began = time.perf_counter()
        self._sock.sendall(_REQUEST)
        answer = b""
        while not answer.endswith(b"}"):
            data = self._sock.recv(_RECEIVE)
            if not data:
                raise RuntimeError("the server closed the connection")
            answer += data
        took = time.perf_counter() - began
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"the answer was {answer!r}")
        return took * 1e3

    def close(self) -> None:
        self._sock.close()


def answer_for_ever(port: int) -> None:
    """Be the floor, for one client."""
    with socket.create_server(("127.0.0.1", port)) as listener:
        client, _ = listener.accept()
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while client.recv(_RECEIVE):
            client.sendall(_ANSWER)


def stream_for_ever(port: int, streams: int, tokens: int) -> None:
    """Be the load."""
    load_generator.run(port, streams, "/generate_stream", tokens, 0.0, float("inf"), stagger=True)


@contextmanager
def beside(target: Any, *args: Any) -> Iterator[None]:
    """Run `target` in a process of its own until the block is left."""
    process = multiprocessing.get_context("spawn").Process(target=target, args=args, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def open_streams(port: int) -> int:
    """Return how many generations are in the server's batch."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
        for line in reply.read().decode().splitlines():
            if line.startswith("tgi_batch_current_size "):
                return int(float(line.split()[1]))
    return 0


def await_load(port: int, streams: int) -> None:
    """Wait until half of so many streams are open; raises RuntimeError where that never is so.

    On a busy machine several may have ended, and be followed by none for a while.
    """
    deadline = time.monotonic() + _START_S
    while (found := open_streams(port)) < streams // 2:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{found} of {streams} streams were open: no such load")
        time.sleep(0.2)


@contextmanager
def loaded(port: int, case: Case) -> Iterator[None]:
    """Keep the case's streams open; it has begun when the block is entered."""
    if not case.streams:
        yield
        return
    with beside(stream_for_ever, port, case.streams, case.tokens):
        await_load(port, case.streams)
        time.sleep(min(2.0, case.streams / 32))  # all of them have had their first tokens
        yield


@contextmanager
def connected(port: int) -> Iterator[Probe]:
    """Connect to a server that may just be starting."""
    deadline = time.monotonic() + _START_S
    while True:
        try:
            probe = Probe(port)
            break
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise RuntimeError(f"nothing listens on port {port}") from None
            time.sleep(0.05)
    try:
        yield probe
    finally:
        probe.close()


def measure(server: Server, case: Case, probes: int, period: float) -> tuple[Summary, Summary]:
    """Return the milliseconds of `/live` and of the floor, `probes` of each, `period` s apart."""
    live: list[float] = []
    floor: list[float] = []
    with (
        reserve_port() as floor_port,
        beside(answer_for_ever, floor_port),
        connected(floor_port) as bare,
        connected(server.port) as ours,
        loaded(server.port, case),
    ):
        for _ in range(10):
            ours.ask()
        due = time.perf_counter()
        for _ in tqdm(range(probes), desc=case.name, leave=False, disable=None):
            due = max(due + period, time.perf_counter())
            time.sleep(max(0.0, due - time.perf_counter()))
            live.append(ours.ask())
            time.sleep(period / 2)  # so that neither is asked in the other's wake
            floor.append(bare.ask())
        await_load(server.port, case.streams)  # they have been open until now
    return Summary.of(live), Summary.of(floor)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="bench.http.live", description=__doc__.split("\n")[0])
    parser.add_argument("--probes", type=int, default=2000, help="of each case")
    parser.add_argument("--period", type=float, default=0.01, help="seconds between two")
    parser.add_argument("--most-streams", type=int, default=512, help="of a case, open at a time")
    add_output_flags(parser)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"load average before: {load:.2f} on {os.cpu_count()} cores")
    rows: list[list[object]] = []
    cases: dict[str, Any] = {}
    columns = ["/live, ms, beside", "p50", "p99", "p99.9", "floor p50", "floor p99", "<= 5 ms"]

    def found() -> tuple[str, dict[str, Any]]:
        return table(columns, rows), {"load_before": load, "goal_ms": GOAL_MS, "cases": cases}

    with reporting(options.json, "http.live", found):
        for (flags, fake), alike in groupby(CASES, lambda case: (case.flags, case.fake)):
            with running(flags, fake=fake) as server:
                for case in alike:
                    streams = min(case.streams, options.most_streams)
                    case = replace(case, streams=streams, name=case.name.format(streams))
                    live, floor = measure(server, case, options.probes, options.period)
                    met = "yes" if live.p99 <= GOAL_MS else "NO"
                    rows.append(
                        [case.name, live.p50, live.p99, live.p99_9, floor.p50, floor.p99, met]
                    )
                    cases[case.name] = {"live_ms": asdict(live), "floor_ms": asdict(floor)}


if __name__ == "__main__":
    main()
