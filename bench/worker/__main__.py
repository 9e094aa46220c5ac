"""The worker's own processor time a step of decodes on a device.

    python -m bench.worker --rows 1 8 64 256 --json bench/out/worker.json

The real loop, runner, sampler and recordings run over a device that takes no time
(`free_device.py`), with commands that are there and replies that nobody reads: what is counted is
planning, packing, launching, reading, settling and encoding. Not the ring, and not what a driver
takes for a launch. Kinds of requests take turns. Beside the median of all steps stands what one in
twenty takes at most: where others compute, the median has cold caches in it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections import deque
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from bench.harness.stats import add_output_flags, reporting, table_of
from tgi_trio.ipc.frame_codec import encode
from tgi_trio.ipc.frames import FrameKind
from tgi_trio.ipc.messages import PrefillRow, SamplingParameters, encode_prefill
from tgi_trio.ipc.startup import BLOCK_SIZE, WarmupRequest, encode_warmup
from tgi_trio.settings.records import ShardOptions
from tgi_trio.shard.loop.worker import Worker
from tgi_trio.shard.loop_channel import Writer

KINDS = {
    "greedy": SamplingParameters(),
    "sampled": SamplingParameters(seed=1, sample=True, temperature=0.7, top_p=0.9, top_k=50),
    "penalties": SamplingParameters(repetition_penalty=1.1, frequency_penalty=0.2),
    "logprobs": SamplingParameters(top_n=5),
    "grammar": SamplingParameters(grammar="anything"),
}
SETTLED = 40  # steps that are not counted
CONTEXT = 500  # tokens of a sequence before the first step
GOAL_US = (60.0, 0.4)  # of a step, and of each of its rows


class Commands:
    """A channel whose commands are there, and which notes when a reply is sent."""

    def __init__(self, frames: list[bytes], steps: int) -> None:
        """SHUTDOWN follows `steps` replies after `frames`."""
        self.writer: Writer = self
        self.max_payload = 1 << 20
        self.times: list[int] = []  # thread_time_ns of every STEP
        self._frames = deque(frames)
        self._steps = steps

    def try_receive(self) -> memoryview | None:
        if self._frames:
            return memoryview(self._frames[0])
        if len(self.times) < self._steps:
            return None
        self._frames.append(encode(FrameKind.SHUTDOWN, {"command": 9}, {}))
        return memoryview(self._frames[0])

    def release(self) -> None:
        self._frames.popleft()

    def wait(self, timeout: float | None) -> bool:
        return True

    def send(self, payload: bytes | memoryview) -> None:
        self.times.append(time.thread_time_ns())

    def beat(self, step: int, phase: int) -> None: ...


def measure(sampling: SamplingParameters, rows: int, steps: int) -> list[float]:
    """Return the processor time of each step in microseconds."""
    from bench.worker.free_device import FreeRunner  # imports Triton

    total = CONTEXT + 2 * (SETTLED + steps)
    need = -(-total // BLOCK_SIZE)
    prompt = np.arange(CONTEXT, dtype=np.int32)
    request = WarmupRequest(CONTEXT * rows, total, rows, rows * need * BLOCK_SIZE)
    sequences = [
        PrefillRow(
            i + 1,
            *(prompt, CONTEXT, CONTEXT - 1),
            range(1 + i * need, 1 + (i + 1) * need),
            total - CONTEXT - 1,
            sampling=sampling,
        )
        for i in range(rows)
    ]
    channel = Commands(
        [encode_warmup(1, request), encode_prefill(2, sequences)], SETTLED + steps + 1
    )
    with torch.inference_mode():  # as in the shard's process
        Worker(channel, FreeRunner((rows,)), ShardOptions()).serve()
    taken = np.diff(channel.times)[SETTLED : SETTLED + steps] - clock_ns()
    return list[float](taken / 1e3)


def clock_ns() -> int:
    """Return what it takes at least to look at the clock, as is done once a step."""
    looks = [time.thread_time_ns() for _ in range(200)]
    return int(np.diff(looks).min())


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench.worker", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--kinds", choices=sorted(KINDS), nargs="+", default=list(KINDS))
    parser.add_argument("--steps", type=int, default=200, help="of each kind in a turn")
    parser.add_argument("--turns", type=int, default=3)
    add_output_flags(parser)
    options = parser.parse_args(argv)
    found: dict[tuple[int, str], list[tuple[float, float]]] = {}

    def rows() -> list[dict[str, Any]]:
        goals = {count: GOAL_US[0] + GOAL_US[1] * count for count in options.rows}
        return [
            {
                "rows": count,
                "kind": kind,
                "least_us": min(least for least, _ in us),
                "median_us": statistics.median(median for _, median in us),
                "goal_us": goals[count],
            }
            for (count, kind), us in found.items()
        ]

    def report() -> tuple[str, dict[str, Any]]:
        return table_of(rows()), {"rows": rows()}

    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported
    from bench.worker.free_device import free_device

    turn = list(itertools.product(options.rows, options.kinds))
    with reporting(options.json, "worker", report), free_device():
        for count, kind in tqdm(turn * options.turns, leave=False):
            taken = measure(KINDS[kind], count, options.steps)
            few = float(np.percentile(taken, 5))
            found.setdefault((count, kind), []).append((few, statistics.median(taken)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
