"""What another thread of the team brings: measured for the cores there are, counted for more.

    python -m bench.model.threads --shapes S M --json bench/out/threads.json

Measured: teams of 1, 2, ... threads take turns; beside them what memory gives so many threads,
which is what a decode step of one sequence can gain. Counted: of a decode step of one sequence, how
evenly the work of a team of any size can be shared. Panels are shared whole, so of 18 panels and
16 threads somebody has two and a step takes as long as with 9; attention has one piece of work per
token and KV head. `linear` and `attention` are the parts of a team that has work on average.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench.harness.checkpoints import SHAPES, make
from bench.harness.stats import add_output_flags, reporting, table_of
from bench.machine.bandwidth import Bandwidth
from bench.model.cases import CASES, Worker
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.shard.cpu_backend.instructions import find_variant
from tgi_trio.shard.cpu_backend.weight_layout import PANEL
from tgi_trio.shard.machine.cores import usable_cores

MEASURED = ("decode 1", "decode 8", "decode 32", "prefill 512")
TEAMS = (1, 2, 4, 8, 16, 32)


def measure(folder: Path, teams: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Return the median milliseconds of each case per team; the teams take turns."""
    times: dict[tuple[str, int], list[float]] = {}
    with ExitStack() as stack:
        workers = {
            count: stack.enter_context(
                closing(
                    Worker(
                        f"{count} threads",
                        [sys.executable, "-m", "bench.model.worker", "kernels", folder, str(count)],
                    )
                )
            )
            for count in teams
        }
        rounds = [(case, n) for case in MEASURED for _ in range(repeats) for n in teams]
        for case, count in tqdm(rounds, desc=folder.name, file=sys.stderr):
            times.setdefault((case, count), []).append(workers[count].measure(CASES[case]))
    rows = []
    for case in MEASURED:
        took = {count: statistics.median(times[case, count]) for count in teams}
        gains = {f"gain of {n}": took[teams[0]] / took[n] for n in teams[1:]}
        rows.append({"case": case, **{f"{n}, ms": ms for n, ms in took.items()}, **gains})
    return rows


def bandwidths(teams: Sequence[int], repeats: int) -> dict[int, float]:
    """Return the median GB/s that so many threads read together."""
    probes = {count: Bandwidth(count) for count in teams}
    read = {
        count: [probe.gigabytes_per_second() for _ in range(repeats)]
        for count, probe in probes.items()
    }
    return {count: statistics.median(values) for count, values in read.items()}


def shared(spec: DecoderSpec, threads: int) -> dict[str, float]:
    """Return which part of a team has work on average, in a decode step of one sequence.

    `linear` is weighted by the bytes of the products, `attention` counts its items.
    """
    query, key = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    gate = 2 if spec.gated else 1
    layer = [
        (spec.hidden_size, query + 2 * key),
        (query, spec.hidden_size),
        (spec.hidden_size, gate * spec.mlp_width),
        (spec.mlp_width, spec.hidden_size),
    ]
    products = layer * len(spec.layers) + [(spec.hidden_size, spec.vocab_size)]
    work = slowest = 0.0
    for inputs, outputs in products:
        panels = -(-outputs // PANEL)
        work += inputs * panels
        slowest += inputs * -(-panels // threads)
    variant = find_variant(spec, "bfloat16")
    items = spec.heads // variant.heads
    return {
        "threads": threads,
        "linear": work / (slowest * threads),
        "attention": items / (-(-items // threads) * threads),
    }


def summary(results: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the tables of what there is, and all of it."""
    memory = results.get("gigabytes_per_second", {})
    gains = [{"threads": n, "GB/s": gb, "gain": gb / memory[1]} for n, gb in memory.items()]
    parts = [table_of(gains)]
    for shape, found in results["shapes"].items():
        parts.append(f"shape {shape}\n{table_of(found['measured'])}\n{table_of(found['counted'])}")
    return "\n\n".join(parts), results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["S", "M"], choices=sorted(SHAPES))
    parser.add_argument("--repeats", type=int, default=5)
    add_output_flags(parser)
    args = parser.parse_args()
    teams = range(1, len(usable_cores()) + 1)
    results: dict[str, Any] = {"shapes": {}}
    with reporting(args.json, "model.threads", partial(summary, results)):
        results["gigabytes_per_second"] = bandwidths(teams, args.repeats)
        for shape in args.shapes:
            with tempfile.TemporaryDirectory(prefix=f"tgi-trio-{shape}-") as folder:
                make(shape, Path(folder))
                spec = decoder_spec(read_config(Path(folder)))
                assert spec is not None
                found: dict[str, Any] = {"measured": [], "counted": []}
                results["shapes"][shape] = found
                found["counted"] = [shared(spec, count) for count in TEAMS]
                found["measured"] = measure(Path(folder), teams, args.repeats)


if __name__ == "__main__":
    main()
