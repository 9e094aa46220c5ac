"""What choosing a batch's next tokens costs: one setting, and every setting at once.

    python -m bench.model.sampler --json bench/out/sampler.json

Every case is timed with the kernels of the CPU backend and with torch, in turns. `greedy` is
the floor beside which the others stand; `mixed` gives each row another setting in turn.
The goal: `mixed` costs at most twice the dearest way of the settings that it is mixed from alone.
Scores are normal with the standard deviation `spread`: 4 is a model's usual confidence, 1 is nearly
flat, so that thousands of tokens survive a truncation. All cases alternate call by call, the two
samplers round by round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bench.harness.stats import add_output_flags, reporting, table_of
from tgi_trio.ipc.messages import SamplingParameters
from tgi_trio.shard.contract import ShardSequence
from tgi_trio.shard.cpu_backend.cpu_sampler import CpuSampler
from tgi_trio.shard.machine.cores import usable_cores
from tgi_trio.shard.sampling.base import RowSampler
from tgi_trio.shard.torch_backend.sampling.torch_sampler import Sampler

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"sample": True, "temperature": 0.8},
    "top-k": {"sample": True, "top_k": 50},
    "top-p": {"sample": True, "top_p": 0.9, "temperature": 0.7},
    "typical-p": {"sample": True, "typical_p": 0.9},
    "min-p": {"sample": True, "min_p": 0.05},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.1},
    "tops": {"top_n": 5},
}


def rows_of(names: list[str], batch: int, length: int, vocab: int) -> list[ShardSequence]:
    """Return `batch` sequences of `length` tokens, the settings `names` in turn."""
    draw = np.random.default_rng(0)
    rows = []
    for i in range(batch):
        ids = draw.integers(0, vocab, length + 8, dtype=np.int32)
        sampling = SamplingParameters(seed=i, **SETTINGS[names[i % len(names)]])
        rows.append(ShardSequence(i, ids, length, length // 2, length - 1, [], 7, 0, sampling))
    return rows


def measure(batch: int, vocab: int, spread: float, count: int) -> dict[str, dict[str, float]]:
    """Return the median milliseconds of a call per sampler and case; all calls alternate."""
    cases = {name: [name] for name in SETTINGS} | {"mixed": list(SETTINGS)}
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((batch, vocab), generator=generator) * spread
    work = torch.empty_like(logits)
    cores = usable_cores()
    makers: dict[str, Callable[[], RowSampler]] = {
        "kernels": lambda: CpuSampler(vocab, [1], cores=cores),
        "torch": lambda: Sampler(vocab, [1], torch.device("cpu")),
    }
    samplers = {(kind, name): make() for kind, make in makers.items() for name in cases}
    rows = {name: rows_of(names, batch, 500, vocab) for name, names in cases.items()}
    times: dict[tuple[str, str], list[float]] = {}
    for turn in range(count + 1):  # one to warm up
        # One kind after the other: torch's threads spin for a while after a call, on the very cores
        # that the kernels want, and no server has both.
        for kind in makers:
            for name, some in rows.items():
                np.copyto(work.numpy(), logits.numpy())  # the sampler writes into its scores
                began = time.perf_counter()
                samplers[kind, name].choose(work.numpy(), some)
                if turn:
                    elapsed = (time.perf_counter() - began) * 1e3
                    times.setdefault((kind, name), []).append(elapsed)
    return {kind: {name: statistics.median(times[kind, name]) for name in rows} for kind in makers}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench.model.sampler", description=__doc__)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--spreads", type=float, nargs="+", default=[4.0, 1.0])
    parser.add_argument("--count", type=int, default=5, help="calls of each case")
    add_output_flags(parser)
    options = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []

    def found() -> tuple[str, dict[str, Any]]:
        return table_of(rows), {"batch": options.batch, "ms": rows}

    with reporting(options.json, "model.sampler", found):
        for spread in options.spreads:
            print(f"spread {spread:g} ...", file=sys.stderr, flush=True)
            times = measure(options.batch, options.vocab, spread, options.count)
            for kind, cases in times.items():
                dearest = max(value for name, value in cases.items() if name != "mixed")
                ratio = cases["mixed"] / dearest
                rows.append({"spread": spread, "sampler": kind, **cases, "mixed / dearest": ratio})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
