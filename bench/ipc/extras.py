"""What is not a round trip: decode replies, death, idleness, the step gap, the broadcast."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import trio

from bench.harness.vitals import cpu_seconds
from bench.ipc.ours import Variant, channel
from bench.ipc.sampling import Placement
from tgi_trio.ipc.control import ControlPage
from tgi_trio.ipc.endpoints import Endpoints
from tgi_trio.ipc.frame_codec import Frame, encode
from tgi_trio.ipc.frames import SPECS, FrameKind
from tgi_trio.ipc.router_end import RouterEnd
from tgi_trio.ipc.spawn import ShardProcess, spawn_shard
from tgi_trio.ipc.watch import StallDetector, wait_for_death

ROWS = 128
STREAMS = 512
READ = ("sequence", "computed", "token_count", "finish", "token_ids", "logprobs")
Result = dict[str, Any]


def step_frame(rows: int) -> tuple[dict[str, int], dict[str, Any]]:
    """Return words and columns of a decode step: one token for each of `rows` sequences."""
    words = {name: 1 for name, _ in SPECS[FrameKind.STEP].words}
    columns = {
        "sequence": np.arange(rows, dtype=np.uint64),
        "computed": np.arange(rows, dtype=np.uint32),
        "token_count": np.ones(rows, dtype=np.uint32),
        "prompt_count": np.zeros(rows, dtype=np.uint32),
        "finish": np.zeros(rows, dtype=np.uint32),
        "token_ids": np.arange(rows, dtype=np.int32),
        "logprobs": np.zeros(rows, dtype=np.float32),
        "top_count": np.zeros(rows, dtype=np.uint32),
    }
    return words, columns


def decode_reply() -> Result:
    """Time encoding a 128-row STEP frame, and reading it as column views; microseconds."""
    words, columns = step_frame(ROWS)
    frame = memoryview(encode(FrameKind.STEP, words, columns))

    def read() -> None:
        decoded = Frame(frame)
        for name in READ:
            decoded.column(name)

    encoding, reading = _best(lambda: encode(FrameKind.STEP, words, columns)), _best(read)
    return {"encode_us": encoding, "read_us": reading, "total_us": encoding + reading}


def _best(function: Callable[[], object], rounds: int = 2000) -> float:
    """Return microseconds per call: the best of five, because other load only ever adds."""
    times = []
    for _ in range(5):
        start = time.perf_counter_ns()
        for _ in range(rounds):
            function()
        times.append((time.perf_counter_ns() - start) / rounds / 1000)
    return round(min(times), 2)


def death(mebibytes: int, rounds: int) -> Result:
    """Time from SIGKILL to knowing of it in trio, by mutex and by pidfd; medians, µs."""

    async def once() -> tuple[float, float]:
        never = os.eventfd(0, os.EFD_CLOEXEC)
        with Endpoints.create(0, 1) as endpoints, _hold(endpoints, mebibytes) as child:
            endpoints.release_child_ends()
            while child_starts(endpoints):
                await trio.sleep(0.01)
            noticed: dict[str, int] = {}

            async def watch(name: str, wait: Callable[..., Any], *arguments: object) -> None:
                await wait(*arguments)
                noticed[name] = time.perf_counter_ns()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch, "mutex", wait_for_death, never, endpoints.page)
                nursery.start_soon(watch, "pidfd", trio.lowlevel.wait_readable, child.pidfd)
                await trio.sleep(0.1)  # the watching thread must be waiting by then
                start = time.perf_counter_ns()
                child.kill()
            os.close(never)
        return tuple((noticed[name] - start) / 1000 for name in ("mutex", "pidfd"))  # type: ignore[return-value]

    async def main() -> list[tuple[float, float]]:
        return [await once() for _ in range(rounds)]

    mutex, pidfd = np.median(np.array(trio.run(main)), axis=0)
    return {"resident_mib": mebibytes, "mutex_us": float(mutex), "pidfd_us": float(pidfd)}


def child_starts(endpoints: Endpoints) -> bool:
    return endpoints.page.vitals.step == 0


def _hold(endpoints: Endpoints, mebibytes: int) -> ShardProcess:
    argv = [sys.executable, "-m", "bench.ipc.children", "hold", str(mebibytes)]
    return spawn_shard([*argv, endpoints.spec.text()], endpoints)


async def _watch_heartbeat(page: ControlPage) -> None:
    """Look at the heartbeat once a second, as the router's supervisor does."""
    detector = StallDetector(240.0)  # it has to start first
    while True:
        detector.observe(trio.current_time(), page.vitals, page.describe_shard)
        await trio.sleep(1.0)


def idle(seconds: float) -> Result:
    """Return the CPU time that router and shard use while nobody asks for anything; percent."""

    async def main() -> Result:
        program = ("bench.ipc.children", "idle", "-1")
        with channel(Variant("idle", router_spin=50), -1, program) as end:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_watch_heartbeat, end.page)
                nursery.start_soon(_drain_for_ever, end)
                while end.vitals.pid == 0 or not end.page.alive_held:
                    await trio.sleep(0.01)
                await trio.sleep(0.5)
                before = time.process_time(), cpu_seconds(end.vitals.pid)
                await trio.sleep(seconds)
                after = time.process_time(), cpu_seconds(end.vitals.pid)
                nursery.cancel_scope.cancel()
        router, shard = (100 * (b - a) / seconds for a, b in zip(before, after, strict=True))
        return {"seconds": seconds, "router_percent": router, "shard_percent": shard}

    return trio.run(main)


async def _drain_for_ever(end: RouterEnd) -> None:
    while True:
        await end.wait()
        while end.try_receive() is not None:
            end.release()


def step_gap(place: Placement, steps: int) -> Result:
    """Return the gap between a shard's steps while the router writes 512 SSE streams; µs.

    The shard computes 1 ms per step and sends a 512-row STEP frame after each; the router turns
    every row into an event and writes it to that stream's socket, one write per stream for all
    frames that have queued up. The gap is what the shard spends between two steps: encode,
    publish, ring, look for commands, beat.
    """

    async def main() -> list[int]:
        program = ("bench.ipc.children", "steps", str(place.peer), str(steps))
        with Streams() as streams, channel(Variant("gap"), place.peer, program) as end:
            while True:
                await end.wait()
                while (view := end.try_receive()) is not None:
                    if view[:4] == b"gaps":
                        return list(view[8:].cast("q"))
                    frame = Frame(view)
                    sequences, tokens = frame.column("sequence"), frame.column("token_ids")
                    streams.add(sequences.tolist(), tokens.tolist())
                    end.release()
                streams.flush()

    gaps = np.array(trio.run(main)[steps // 10 :]) / 1000
    p50, p99 = (float(v) for v in np.percentile(gaps, (50, 99)))
    return {"streams": STREAMS, "steps": steps, "p50_us": p50, "p99_us": p99}


class Streams:
    """512 TCP connections to write events to. Their other ends are emptied now and then."""

    def __init__(self) -> None:
        files = 2 * STREAMS + 100
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(files, hard)), hard))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.pairs = [
                (socket.create_connection(listener.getsockname()), listener.accept()[0])
                for _ in range(STREAMS)
            ]
        for pair in self.pairs:
            for end in pair:
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                end.setblocking(False)
        self.pending = [b""] * STREAMS
        self.flushes = 0

    def add(self, sequences: list[int], tokens: list[int]) -> None:
        """Append one event to every stream in `sequences`."""
        pending = self.pending
        for sequence, token in zip(sequences, tokens, strict=True):
            pending[sequence] += b'data: {"token":{"id":%d,"text":" word"}}\n\n' % token

    def flush(self) -> None:
        """Write what is pending; every 32nd time also empty the other ends."""
        self.flushes += 1
        for number, data in enumerate(self.pending):
            if data:
                ours, theirs = self.pairs[number]
                ours.send(data)
                if self.flushes & 31 == number & 31:
                    with suppress(BlockingIOError):  # nothing may have come through yet
                        theirs.recv(1 << 20)
        self.pending = [b""] * STREAMS

    def __enter__(self) -> Streams:
        return self

    def __exit__(self, *_: object) -> None:
        for pair in self.pairs:
            for end in pair:
                end.close()


def broadcast(followers: int, payload: int, rounds: int) -> Result:
    """Return the time for rank 0 to command all followers and hear from each; microseconds."""
    endpoints = [Endpoints.create(rank, 1, spin_us=0) for rank in range(1, followers + 1)]
    children = [
        spawn_shard([sys.executable, "-m", "bench.ipc.echo", "ring", "-1", each.spec.text()], each)
        for each in endpoints
    ]
    fds = [fd for each in endpoints for fd in each.spec.fds]
    argv = [sys.executable, "-m", "bench.ipc.children", "lead", str(payload), str(rounds)]
    try:
        leader = subprocess.run(
            [*argv, *(each.spec.text() for each in endpoints)],
            pass_fds=fds, capture_output=True, text=True, check=True,
        )  # fmt: skip
    finally:
        for child, each in zip(children, endpoints, strict=True):
            child.close()
            each.close()
    send, done, tail = (float(x) for x in leader.stdout.split())
    return {"followers": followers, "payload": payload,
            "send_p50_us": send, "done_p50_us": done, "done_p99_us": tail}  # fmt: skip
