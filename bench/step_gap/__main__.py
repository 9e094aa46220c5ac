"""Step gap: end of one step's compute to the start of the next, measured by the shard.

    python -m bench.step_gap --streams 1 64 512 --step-ms 1 --json bench/out/step_gap.json

The shard runs the real worker loop on a model that only takes time. Three rows per number of
streams in one run: the floor, where the other end of the ring does nothing but read, the same with
a second rank to tell every plan, and the whole router writing server-sent events to as many real
connections, held by a third process.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import trio
from tqdm import tqdm

from bench.harness import stats
from bench.harness.stats import Summary
from tgi_trio.demo import model_path
from tgi_trio.ipc.frames import FrameKind
from tgi_trio.ipc.messages import PrefillRow, encode_prefill
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.model.config import read_config
from tgi_trio.model.facts import find_model_facts
from tgi_trio.process.sockets import bind_sockets
from tgi_trio.router.assembly import Assembly, make_text_processors
from tgi_trio.router.engine.shard_link import ShardLink
from tgi_trio.router.scheduling import SchedulingLimits
from tgi_trio.router.shards import handshake
from tgi_trio.router.shards.local_group import LocalGroup
from tgi_trio.router.shards.supervisor import Supervisor, Watch
from tgi_trio.router.telemetry.metrics import Histogram, Metrics
from tgi_trio.router.text.text_processor import TextProcessor
from tgi_trio.router.text.tokenizer import Tokenizer
from tgi_trio.settings.records import Options
from tgi_trio.settings.resolve import resolve, with_kv

TOKENS_PER_STREAM = 40_000  # KV room: no stream ends during the measurement
SECONDS_TO_SETTLE = 1.0  # at most: a measurement is never the shorter part
PATIENCE_S = 60.0  # for the first gap, where a busy machine has let no two steps run in time


class Gaps(Histogram):
    """Keeps every observation beside counting it."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        super().__init__(bounds)
        self.kept: list[float] = []

    def observe(self, value: float) -> None:
        self.kept.append(value)
        super().observe(value)


class GapMetrics(Metrics):
    """Keeps every step gap, in seconds."""

    def __init__(self) -> None:
        super().__init__()
        name = "tgi_batch_step_gap_duration"
        self._gaps = self._histograms[name] = Gaps(self.histogram(name).bounds)

    @property
    def gaps(self) -> list[float]:
        return self._gaps.kept


def busy_argv(step_ms: float, spec: str, settings: str) -> list[str]:
    """Return the command line of a shard that computes `step_ms` a step, on the last core."""
    options = {"step_ms": step_ms, "cpu": (os.cpu_count() or 1) - 1}
    return [sys.executable, "-m", "bench.step_gap.busy_shard", spec, json.dumps(options), settings]


def warmup(streams: int) -> WarmupRequest:
    return WarmupRequest(1024, TOKENS_PER_STREAM, streams, streams * TOKENS_PER_STREAM)


@dataclass
class Reading:
    """What one run showed."""

    gaps: list[float]  # seconds
    events_per_s: float
    tell_us: float = 0.0  # median time in which rank 0 tells the others a plan


async def floor(streams: int, step_ms: float, seconds: float, ranks: int = 1) -> Reading:
    """Measure with a reader that only reads."""
    argv = functools.partial(busy_argv, step_ms)
    shard = ShardSettings(model_path=Path(), world_size=ranks)
    with LocalGroup.spawn(argv, shard, warmup(streams), 1, 0) as group:
        end = group.end
        await handshake.hello(end, 1)
        await handshake.info(end)
        memory = await handshake.warm_up(end, warmup(streams))
        need = TOKENS_PER_STREAM // memory.block_size
        for i in range(streams):
            blocks = range(1 + i * need, 1 + (i + 1) * need)
            row = PrefillRow(i + 1, np.array([1], np.int32), 1, 0, blocks, TOKENS_PER_STREAM - 2)
            await end.send(encode_prefill(i + 1, [row]), PATIENCE_S)
        gaps: list[float] = []
        telling: list[float] = []
        link, events = ShardLink(end), 0
        start = trio.current_time()
        settled = start + min(SECONDS_TO_SETTLE, seconds)
        with trio.move_on_at(settled + seconds + PATIENCE_S):
            while (now := trio.current_time()) < settled + seconds or not gaps:
                await link.wait()
                for frame in link.replies():
                    if frame.kind is FrameKind.STEP and now > settled:
                        gaps.append(frame.word("gap_ns") / 1e9)
                        telling.append(frame.word("forward_ns") / 1e3 - step_ms * 1e3)
                        events += frame.word("tokens")
        measured = trio.current_time() - settled
    told = statistics.median(telling) if telling and ranks > 1 else 0.0
    return Reading(gaps, events / measured, told)


async def router(streams: int, step_ms: float, seconds: float) -> Reading:
    """Measure with the router serving `streams` clients."""
    metrics = GapMetrics()
    options = Options(
        hostname="127.0.0.1", port=0, max_concurrent_requests=streams, max_batch_size=streams
    )
    config = read_config(model_path())
    settings = resolve(options, find_model_facts(config))
    supervisor = Supervisor(
        metrics,
        LocalGroup.starter(functools.partial(busy_argv, step_ms), ShardSettings(model_path=Path())),
        warmup(streams),
        watch=Watch(),
    )
    text_processor = TextProcessor(Tokenizer.from_folder(model_path()))
    front = Assembly(make_text_processors(settings, config, text_processor), metrics)
    shutdown = trio.Event()
    async with trio.open_nursery() as nursery:
        started = await nursery.start(supervisor.run)
        memory = started.memory
        settings = with_kv(settings, memory.blocks - 1, memory.block_size)
        limits = SchedulingLimits(
            blocks=memory.blocks,
            block_size=memory.block_size,
            max_batch_size=streams,
            max_batch_prefill_tokens=1024,
            max_batch_total_tokens=0,
            max_total_tokens=TOKENS_PER_STREAM,
            waiting_served_ratio=0.3,
            max_waiting_tokens=20,
            max_queued_requests=streams,
            max_queued_tokens=streams * TOKENS_PER_STREAM,
            token_budget=1024,
            reserve=True,
            prefix_caching=False,
        )
        settings = stretch(settings)
        engine = front.open(settings, limits, supervisor, started.info)
        supervisor.attach(engine)
        with bind_sockets(["127.0.0.1:0"]) as listeners:
            await nursery.start(front.serve, listeners, [], shutdown)
            argv = [sys.executable, "-m", "bench.step_gap.sink", str(listeners[0].getsockname()[1])]
            sink = subprocess.Popen([*argv, str(streams), "0"], stdout=subprocess.PIPE)
            try:
                while engine.scheduler.batch_size < streams:
                    await trio.sleep(0.05)
                found = await read_gaps(metrics, streams, seconds)
            finally:
                sink.kill()
                sink.communicate()
            shutdown.set()
            supervisor.stop()
            await front.closed.wait()
            await supervisor.ended.wait()
    return found


async def read_gaps(metrics: GapMetrics, streams: int, seconds: float) -> Reading:
    """Return what the metrics observe in `seconds`, once the streams have settled."""
    await trio.sleep(min(SECONDS_TO_SETTLE, seconds))
    metrics.gaps.clear()
    before, began = metrics.value("tgi_batch_inference_count"), trio.current_time()
    await trio.sleep(seconds)
    with trio.move_on_after(PATIENCE_S):
        while not metrics.gaps:
            await trio.sleep(0.05)
    steps = metrics.value("tgi_batch_inference_count") - before
    return Reading(list(metrics.gaps), steps * streams / (trio.current_time() - began))


def stretch(settings: Any) -> Any:
    """Let requests be as long as the measurement needs."""
    from dataclasses import replace

    return replace(settings, max_total_tokens=2_000_000, max_input_tokens=1000)


def main() -> None:
    """Parse flags, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 512])
    parser.add_argument("--step-ms", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=5.0)
    stats.add_output_flags(parser)
    args: argparse.Namespace = parser.parse_args()
    os.sched_setaffinity(0, {0})
    results: list[dict[str, Any]] = []
    kinds: dict[str, Callable[[int, float, float], Awaitable[Reading]]] = {
        "floor": floor,
        "floor, 2 ranks": functools.partial(floor, ranks=2),
        "router": router,
    }
    runs = [(n, name) for n in args.streams for name in kinds]

    def found() -> tuple[str, dict[str, Any]]:
        return table(results), {"step_ms": args.step_ms, "results": results}

    with stats.reporting(args.json, "step_gap", found):
        for streams, name in tqdm(runs, desc="runs"):
            reading = trio.run(kinds[name], streams, args.step_ms, args.seconds)
            if not reading.gaps:
                raise SystemExit(
                    f"{streams} streams, {name}: no two steps in {args.seconds:g} s to have a gap "
                    "between them; measure longer (--seconds)"
                )
            results.append(
                {
                    "streams": streams,
                    "what": name,
                    "events_per_s": reading.events_per_s,
                    "gap_us": asdict(Summary.of([gap * 1e6 for gap in reading.gaps])),
                    "tell_us": reading.tell_us,
                }
            )


def table(results: list[dict[str, Any]]) -> str:
    """Return the table of what has been measured."""
    header = (
        *("streams", "other end", "steps", "gap p50 us", "p90", "p99", "p99.9"),
        *("telling us", "events/s"),
    )
    rows = [
        (
            r["streams"],
            r["what"],
            r["gap_us"]["n"],
            *(r["gap_us"][p] for p in ("p50", "p90", "p99", "p99_9")),
            r["tell_us"],
            r["events_per_s"],
        )
        for r in results
    ]
    return stats.table(header, rows)


if __name__ == "__main__":
    main()
