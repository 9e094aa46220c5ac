"""One decode step in plain torch: ours against the least that torch can do, side by side.

    python -m bench.torch_step --shape M --json bench/out/torch_step.json

`floor` is a loop written for this one model shape, with nothing of a server in it: oneDNN's
linears (packed where the processor has such), one attention call per sequence over memory that lies
in order, the best token taken. Ours is `TorchRunner.step` as the worker calls it: any family, block
tables, sampling by the sampler. The two alternate step by step, so that both see the machine in the
same state.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.harness import checkpoints
from bench.harness.stats import add_output_flags, reporting, table_of
from bench.torch_step.floor import Floor
from tgi_trio.ipc.messages import SamplingParameters
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import BLOCK_SIZE, WarmupRequest
from tgi_trio.model.config import read_config
from tgi_trio.shard.contract import ShardSequence, StepPlan
from tgi_trio.shard.runner import Runner
from tgi_trio.shard.torch_backend.torch_loading import load_torch_runner

Step = Callable[[], list[int]]


def decode_plan(batch: int, context: int) -> StepPlan:
    """Return a step that decodes one token of `batch` sequences of `context` earlier tokens."""
    width = -(-(context + 1) // BLOCK_SIZE)
    tables = 1 + np.arange(batch * width, dtype=np.int32).reshape(batch, width)
    slots = tables[:, context // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + context % BLOCK_SIZE
    ids = np.full(context + 8, 5, np.int32)
    rows = [
        ShardSequence(
            i, ids, context + 1, context, context, tables[i].tolist(), 7, 0, SamplingParameters()
        )
        for i in range(batch)
    ]
    return StepPlan(
        rows=rows,
        token_ids=np.full(batch, 5, np.int64),
        positions=np.full(batch, context, np.int64),
        kv_slots=slots,
        query_starts=np.arange(batch + 1, dtype=np.int32),
        context_lengths=np.full(batch, context + 1, np.int32),
        block_tables=tables,
        samples=np.ones(batch, np.bool_),
    )


def alternate(steps: dict[str, Step], count: int) -> dict[str, list[float]]:
    """Return each step's times in milliseconds, `count` of each, turn by turn."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(count + 2):  # two to warm up
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            if turn >= 2:
                times[name].append((time.perf_counter() - began) * 1e3)
    return times


def measure(
    runner: Runner, folder: Path, shape: str, batch: int, context: int, count: int
) -> dict[str, Any]:
    """Return the medians of both, and of the ratio of neighbouring steps."""
    floor = Floor(folder, checkpoints.SHAPES[shape], batch, context)
    plan, tokens = decode_plan(batch, context), torch.full((batch,), 5)
    times = alternate(
        {
            "floor": lambda: floor.step(tokens),
            "ours": lambda: [row.token_ids[0] for row in runner.step(plan).rows],
        },
        count,
    )
    ratios = [a / b for a, b in zip(times["ours"], times["floor"], strict=True)]
    return {
        "shape": shape,
        "batch": batch,
        "context": context,
        "floor_ms": statistics.median(times["floor"]),
        "ours_ms": statistics.median(times["ours"]),
        "ratio": statistics.median(ratios),
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench.torch_step", description=__doc__)
    parser.add_argument("--shape", choices=sorted(checkpoints.SHAPES), default="M")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=160)
    parser.add_argument("--count", type=int, default=30, help="steps of each")
    parser.add_argument("--folder", type=Path, help="where the checkpoint is, or is made")
    add_output_flags(parser)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as spare:
        folder = checkpoints.make(options.shape, options.folder or Path(spare) / options.shape)
        runner = load_torch_runner(
            ShardSettings(model_path=folder, dtype="bfloat16"), read_config(folder)
        )
        blocks = max(options.batches) * (options.context // BLOCK_SIZE + 2)
        runner.warm_up(WarmupRequest(64, 512, max(options.batches), blocks * BLOCK_SIZE))
        rows: list[dict[str, Any]] = []

        def found() -> tuple[str, dict[str, Any]]:
            return table_of(rows), {"rows": rows, "backend": runner.info.backend}

        with reporting(options.json, "torch_step", found):
            for batch in options.batches:
                print(f"batch {batch} ...", file=sys.stderr, flush=True)
                rows.append(
                    measure(runner, folder, options.shape, batch, options.context, options.count)
                )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
