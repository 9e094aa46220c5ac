"""What a front adds to its replicas' answers, and what their clients see when one is killed.

    python -m bench.cluster.front --json bench/out/front.json

The replicas are whole servers whose shards have no model. Of one replica some streams are asked for
through the front and as many directly, in turns, each time beside one more that is direct: a step's
tokens leave the replica together, so how much later than that one's the others' events come tells
what the front adds. The same is asked for through a relay that only copies (`bare_relay.py`): for
less than that no program in Python passes a token on here. First bytes are asked for in turns, over
a new connection each. Then one of two replicas is killed under streams, all of which must go on at
the other; two replicas are asked for what one was; and, for as long as `--busy-for` says, processes
that do nothing but compute stand in everybody's way, and no replica may be taken for dead.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

from tqdm import tqdm

from bench.harness.server import Server, running, serving
from bench.harness.stats import Summary, add_output_flags, reporting, table_of
from bench.harness.vitals import cpu_seconds, metrics
from tgi_trio.testing.ports import reserve_port

STEP_MS: Final = 20.0  # of the shards: a late token is not taken for the next one
SHORT_STEP_MS: Final = 1.0  # where two replicas are compared with one
SLOTS: Final = 2  # sequences that each of those runs at once: few, so that the step is what limits
MOST_TOKENS: Final = 800  # of a stream under which a replica is killed
SILENCE: Final = 60.0  # seconds without a byte of any stream after which the run has failed
_RECEIVE: Final = 1 << 16


@dataclass
class Stream:
    """One answer as its client sees it."""

    sock: socket.socket
    at: list[float] = field(default_factory=list)  # when each event came, seconds
    tail: bytes = b""
    failed: bool = False

    def take(self) -> bool:
        """Note what has come; whether more may."""
        try:
            data = self.sock.recv(_RECEIVE)
        except ConnectionError:
            data = b""
        now = time.perf_counter()
        seen = self.tail + data
        before = self.tail.count(b"data:")
        self.at += [now] * (seen.count(b"data:") - before)
        self.failed |= b'"error"' in seen
        self.tail = seen[-8:]
        return bool(data) and not seen.endswith(b"0\r\n\r\n")


def ask(port: int, tokens: int, prompt: str = "Once upon") -> Stream:
    """Ask for a stream over a new connection."""
    body = json.dumps({"inputs": prompt, "parameters": {"max_new_tokens": tokens}}).encode()
    sock = socket.create_connection(("127.0.0.1", port), SILENCE)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    head = b"POST /generate_stream HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
    sock.sendall(head + b"content-length: %d\r\n\r\n%b" % (len(body), body))
    return Stream(sock)


def read(streams: Sequence[Stream], watch: Callable[[], None] = lambda: None) -> None:
    """Read all of them to their ends; `watch` is called now and then. Raises TimeoutError."""
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream.sock, selectors.EVENT_READ, stream)
        while selector.get_map():
            ready = selector.select(SILENCE)
            if not ready:
                raise TimeoutError(f"no stream sent anything for {SILENCE:g} s")
            for key, _ in ready:
                if not key.data.take():
                    selector.unregister(key.fileobj)
                    key.data.sock.close()
            watch()


class Replicas(list[Server]):
    """Replicas, and the flags by which a front is one of theirs."""

    flags: Sequence[str] = ()


@contextmanager
def replicas_of(
    count: int, step_ms: float = STEP_MS, limits: Sequence[str] = ()
) -> Iterator[Replicas]:
    """Start some replicas with these `limits`."""
    fake = json.dumps({"step_ms": step_ms, "blocks": 16000})
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        secret = Path(folder, "secret")
        secret.write_text("a secret of the benchmark's own\n")
        replicas = Replicas()
        replicas.flags = ["--cluster-secret-file", str(secret)]
        more = [*replicas.flags, "--max-concurrent-requests", "512", *limits]
        for _ in range(count):
            replicas.append(stack.enter_context(running(more, fake=fake)))
        yield replicas


@contextmanager
def front_of(replicas: Sequence[Server], flags: Sequence[str]) -> Iterator[Server]:
    """Start a front of replicas that are running."""
    with reserve_port() as port:
        named = [word for each in replicas for word in ("--replica", f"127.0.0.1:{each.port}")]
        command = [sys.executable, "-m", "tgi_trio", "front", "--hostname", "127.0.0.1"]
        command += ["--port", str(port), *flags, *named]
        with serving(command, port, output=subprocess.DEVNULL) as front:
            yield front


@contextmanager
def fronted(count: int) -> Iterator[tuple[Server, list[Server]]]:
    """Start some replicas, and a front of them."""
    with replicas_of(count) as replicas, front_of(replicas, replicas.flags) as front:
        yield front, replicas


def lags(replica: Server, port: int, count: int, tokens: int) -> list[float]:
    """Return how much later events of `count` streams came than that of a direct one, ms.

    Its event is the first that a step brings, in the order of admission.
    """
    first = ask(replica.port, tokens)
    streams = [ask(port, tokens) for _ in range(count)]
    read([first, *streams])
    # The first tokens are left out, since they come of steps of their own; so are tokens after the
    # end of the direct stream. An event may be read a little before its step's first one.
    early = STEP_MS / 4e3
    return [
        (moment - first.at[bisect_right(first.at, moment + early) - 1]) * 1e3
        for stream in streams
        for moment in stream.at[2:]
        if first.at[0] < moment < first.at[-1]
    ]


@contextmanager
def relayed(replica: Server) -> Iterator[Server]:
    """Start a relay that only copies."""
    with reserve_port() as port:
        command = [sys.executable, "-m", "bench.cluster.bare_relay"]
        command += ["--port", str(port), "--to", str(replica.port)]
        with serving(command, port, output=subprocess.DEVNULL) as relay:
            yield relay


def added_per_token(
    ways: Mapping[str, Server], replica: Server, count: int, tokens: int, turns: int
) -> list[dict[str, Any]]:
    """Return for each way how much later an event comes by it, and the CPU it takes for that.

    As many streams are read directly and by each way, in turns: at the same time they would wait
    for each other, since all processes share the cores. What a way uses while it has nothing to do,
    as long as such a turn takes, is left out: a front asks after its replicas' health.
    """
    direct: list[float] = []
    later: dict[str, list[float]] = {way: [] for way in ways}
    used = dict.fromkeys(ways, 0.0)
    idle = dict.fromkeys(ways, 0.0)
    for _ in range(turns):
        before = {way: cpu_seconds(server.pid) for way, server in ways.items()}
        direct += lags(replica, replica.port, count, tokens)
        for way, server in ways.items():
            idle[way] += cpu_seconds(server.pid) - before[way]
        for way, server in ways.items():
            began = cpu_seconds(server.pid)
            later[way] += lags(replica, server.port, count, tokens)
            used[way] += cpu_seconds(server.pid) - began
    theirs = Summary.of(direct)
    every = turns * count * tokens / 1e3
    return [
        {
            "streams": count,
            "way": way,
            "direct p50 ms": theirs.p50,
            "direct p99 ms": theirs.p99,
            "added p50 ms": Summary.of(lag).p50 - theirs.p50,
            "added p99 ms": Summary.of(lag).p99 - theirs.p99,
            "CPU ms a token": (used[way] - idle[way]) / every,
            "idle CPU ms a token": idle[way] / every,
        }
        for way, lag in later.items()
    ]


def first_bytes(front: Server, replica: Server, count: int) -> dict[str, Any]:
    """Return the medians of the time to the first event, asked in turns."""
    took: dict[int, list[float]] = {replica.port: [], front.port: []}
    for _ in range(count):
        for port, times in took.items():
            began = time.perf_counter()
            stream = ask(port, 2)
            read([stream])
            times.append((stream.at[0] - began) * 1e3)
    direct, through = (median(times) for times in took.values())
    return {"direct p50 ms": direct, "front p50 ms": through, "added ms": through - direct}


class Overtaken(RuntimeError):
    """The streams were over before a replica was killed under them: nothing was seen."""


def kill_under(count: int, tokens: int) -> dict[str, Any]:
    """Kill one of two replicas under so many streams; return what their clients saw.

    Where they are over too soon, as on a busy machine, two others are killed under longer ones.
    Raises Overtaken when that is not enough.
    """
    while True:
        try:
            with fronted(2) as (front, replicas):
                return kill_one(front, replicas, count, tokens)
        except Overtaken:
            if tokens >= MOST_TOKENS:
                raise
            tokens = min(4 * tokens, MOST_TOKENS)


def kill_one(front: Server, replicas: Sequence[Server], count: int, tokens: int) -> dict[str, Any]:
    """Kill a replica once all streams have begun; return what their clients saw.

    Raises Overtaken.
    """
    streams = [ask(front.port, tokens, f"{place}, once upon") for place in range(count)]
    killed: list[float] = []
    held: list[int] = []

    def watch() -> None:
        if not killed and all(len(stream.at) > tokens // 4 for stream in streams):
            held.extend(int(metrics(each.port)["tgi_batch_current_size"]) for each in replicas)
            victim = max(range(len(replicas)), key=held.__getitem__)
            os.kill(replicas[victim].pid, signal.SIGKILL)
            killed.append(time.perf_counter())

    read(streams, watch)
    if not killed:
        raise Overtaken("no replica was killed: a stream ended before all had begun")
    if not max(held):
        raise Overtaken("the replica that was killed had no streams")
    pauses = [
        (later - sooner) * 1e3
        for stream in streams
        for sooner, later in zip(stream.at, stream.at[1:], strict=False)
        if later > killed[0]
    ]
    lost = sum(stream.failed or len(stream.at) != tokens for stream in streams)
    return {
        "streams": count,
        "of the killed": max(held),
        "lost": lost,
        "longest pause ms": max(pauses, default=0.0),
    }


def throughput(front: Server, clients: int, requests: int, tokens: int) -> float:
    """Return tokens a second while as many `clients` wait for answers of `tokens` each."""
    began, seen, asked, done = time.perf_counter(), 0, 0, 0
    with selectors.DefaultSelector() as selector:
        while done < requests:
            while asked < min(requests, done + clients):
                stream = ask(front.port, tokens, f"{asked}, once upon")
                selector.register(stream.sock, selectors.EVENT_READ, stream)
                asked += 1
            ready = selector.select(SILENCE)
            if not ready:
                raise TimeoutError(f"no stream sent anything for {SILENCE:g} s")
            for key, _ in ready:
                if not key.data.take():
                    if key.data.failed:
                        raise RuntimeError("a stream failed")
                    selector.unregister(key.fileobj)
                    key.data.sock.close()
                    seen += len(key.data.at)
                    done += 1
    return seen / (time.perf_counter() - began)


def compare_replicas(requests: int, tokens: int) -> dict[str, Any]:
    """Return tokens a second of one and of two replicas, of as many clients."""
    found: list[float] = []
    with replicas_of(2, SHORT_STEP_MS, ["--max-batch-size", str(SLOTS)]) as replicas:
        for count in (1, 2):
            with front_of(replicas[:count], replicas.flags) as front:
                throughput(front, 4 * SLOTS, 8, tokens)
                found.append(throughput(front, 4 * SLOTS, requests, tokens))
    one, two = found
    return {"one tokens/s": one, "two tokens/s": two, "ratio": two / one}


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Have so many processes that do nothing but compute."""
    with ExitStack() as stack:
        for _ in range(processes):
            each = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(each.wait)
            stack.callback(each.kill)
        yield


def count_false_deaths(seconds: float, processes: int, tokens: int) -> dict[str, Any]:
    """Return how often a replica was held for dead or suspected while all of them lived."""
    suspected = asked = 0
    with fronted(2) as (front, _), busy(processes):
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            read([ask(front.port, tokens, f"{asked + place}, once upon") for place in range(8)])
            asked += 8
            states = metrics(front.port)
            suspected += states['tgi_front_replicas{state="suspect"}'] > 0
        lost = int(states["tgi_front_lost"])
        load = os.getloadavg()[0]
    return {
        "seconds": seconds,
        "load": load,
        "streams": asked,
        "deaths": lost,
        "looks with a suspect": suspected,
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--killed-under", type=int, nargs="+", default=[8, 128], help="streams")
    parser.add_argument("--tokens", type=int, default=200, help="of a stream")
    parser.add_argument("--turns", type=int, default=3, help="of direct streams and the front's")
    parser.add_argument("--requests", type=int, default=60, help="for first bytes, of each kind")
    parser.add_argument(
        "--answers", type=int, default=80, help="of one replica and of two; 0: none"
    )
    parser.add_argument("--busy-for", type=float, default=0.0, help="seconds; 0: not at all")
    parser.add_argument("--busy-with", type=int, default=30, help="processes")
    add_output_flags(parser)
    options = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {"per token": [], "first byte": [], "killed": []}
    results |= {"two replicas": [], "busy": []}
    load = os.getloadavg()[0]
    steps = len(options.streams) + 3 + len(options.killed_under)
    with (
        reporting(options.json, "cluster.front", partial(summary, load, results)),
        tqdm(total=steps, leave=False, disable=None) as bar,
    ):
        with fronted(1) as (front, (replica,)), relayed(replica) as relay:
            first_bytes(front, replica, 3)  # what is made once
            ways = {"front": front, "relay that only copies": relay}
            for count in options.streams:
                found = added_per_token(ways, replica, count, options.tokens, options.turns)
                results["per token"] += found
                bar.update()
            results["first byte"].append(first_bytes(front, replica, options.requests))
            bar.update()
        for count in options.killed_under:
            results["killed"].append(kill_under(count, options.tokens))
            bar.update()
        if options.answers:
            results["two replicas"].append(compare_replicas(options.answers, options.tokens))
        bar.update()
        if options.busy_for:
            results["busy"].append(
                count_false_deaths(options.busy_for, options.busy_with, options.tokens)
            )
        bar.update()


def summary(load: float, results: dict[str, list[dict[str, Any]]]) -> tuple[str, dict[str, Any]]:
    """Return the tables, and what is written."""
    text = "\n".join(f"{name}\n{table_of(rows)}" for name, rows in results.items() if rows)
    return f"load average before: {load:.2f}\n{text}", {"load_before": load, **results}


if __name__ == "__main__":
    main()
