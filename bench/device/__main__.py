"""Steps on a device beside its roofline, measured in the same run.

    python -m bench.device --shapes 1B 8B --json bench/out/device.json --traces bench/out

For each shape, made on the device with random weights, plain and quantised: the warm-up,
decodes of each batch size with the gap between steps, a long prefill; decodes of rows with LoRA
adapters; then the whole server over
the bare step, and peers where they are installed. `of roofline` is the least time that memory (for
weights as they are stored) and matrix units would need,
as measured here, as a part of what the step took. `bash bench/device/kit.sh` does all of it, tests
first, within ten minutes. `--dry-run` runs everything over a device that is not there, tiny: its
times mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tqdm import tqdm

from bench.device.adapters import measure_adapters
from bench.device.models import PLAIN, SHAPES
from bench.device.peers import installed, measure_peer
from bench.device.roofline import Ceiling, measure_ceiling
from bench.device.server import measure_server
from bench.device.steps import Bench, Plan
from bench.device.timing import Timer
from bench.harness import checkpoints
from bench.harness.stats import add_output_flags, reporting, table
from tgi_trio.shard.checkpoint.rounding.choose import ENCODINGS
from tgi_trio.shard.machine.accelerator import current_device, current_kind, name_of
from tgi_trio.shard.machine.device import graph_sizes

COLUMNS = [
    *("shape", "what", "step_ms", "device_ms", "gap_us", "least_ms", "of_roofline"),
    *("gb_per_s", "tflop_per_s", "over_bare"),
]


def parse() -> argparse.Namespace:
    """Return the flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=["1B", "8B"], choices=SHAPES)
    parser.add_argument(
        "--weights",
        nargs="+",
        default=[PLAIN, "int4", "q4_k", "fp8"],
        choices=[PLAIN, *ENCODINGS],
        help="what linear layers hold: numbers of the dtype, or codes",
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64, 128, 256])
    parser.add_argument("--adapters", type=int, default=8, help="different ones, at most; 0: none")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=32, help="of each decode")
    parser.add_argument("--clients", type=int, default=64, help="of the whole server; 0: none")
    parser.add_argument("--peers", action="store_true", help="measure what else is installed")
    parser.add_argument("--budget", type=float, default=420.0, help="seconds; no part begins later")
    parser.add_argument("--traces", type=Path, help="folder of Chrome traces of a few steps")
    parser.add_argument("--dry-run", action="store_true", help="tiny, over a stand-in device")
    add_output_flags(parser)
    return parser.parse_args()


def shrink(args: argparse.Namespace) -> None:
    """Make what is measured as small as it can be."""
    args.shapes, args.batches, args.context, args.prompt = ["dry"], [1, 2], 6, 8
    args.weights, args.adapters = [PLAIN, "int4"], 2
    args.steps, args.clients, args.budget = 1, min(args.clients, 2), math.inf


def main() -> None:
    """Measure, print, write."""
    args = parse()
    with ExitStack() as stack:
        if args.dry_run:
            shrink(args)
            os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
            from tgi_trio.shard.torch_backend.attention import paged
            from tgi_trio.testing.quick_interpreter import hurry
            from tgi_trio.testing.stand_in_device import StandInDevice

            hurry()
            # An interpreter has one program at a time.
            stack.enter_context(mock.patch.object(paged, "_PROGRAMS", 4))
            stack.enter_context(StandInDevice())
        kind = current_kind()
        if not kind:
            sys.exit("torch sees no device here; --dry-run tries the benchmark without one")
        results: list[dict[str, Any]] = []
        facts: dict[str, Any] = {
            "device": name_of(current_device(kind)),
            "torch": torch.__version__,
        }
        stack.enter_context(reporting(args.json, "device", lambda: report(results, facts)))
        measure_all(args, current_device(kind), results, facts)


def measure_all(
    args: argparse.Namespace,
    device: torch.device,
    results: list[dict[str, Any]],
    facts: dict[str, Any],
) -> None:
    """Measure every part until the budget is spent; add to `results` and `facts`."""
    dtype = torch.float32 if args.dry_run else torch.bfloat16  # Triton interprets no bfloat16
    ceiling = measure_ceiling(Timer(device, 2 if args.dry_run else 20), dtype, small=args.dry_run)
    facts["gb_per_s"] = ceiling.bytes_per_second / 1e9
    facts["tflop_per_s"] = ceiling.operations_per_second / 1e12
    parts: list[tuple[str, str, Callable[[], list[dict[str, Any]]]]] = []
    for rounded in args.weights:
        for shape in args.shapes:
            run = partial(steps, args, shape, device, dtype, ceiling, rounded)
            parts.append((_named(shape, rounded), "steps", run))
        if args.adapters and rounded == PLAIN:
            run = partial(adapters, args, args.shapes[0], device, dtype, ceiling)
            parts.append((args.shapes[0], "adapters", run))
    if args.clients:
        parts.append(("server", "1B", lambda: [server(args, results)]))
    if args.peers:
        parts += [(name, "1B", partial(peer, args, name)) for name in installed()]
    end = time.monotonic() + args.budget
    for name, what, run in tqdm(parts, desc="parts", file=sys.stderr):
        if time.monotonic() > end:
            results.append({"shape": name, "what": f"{what}: not begun, the time was up"})
            continue
        results += run()


def steps(
    args: argparse.Namespace,
    shape: str,
    device: torch.device,
    dtype: torch.dtype,
    ceiling: Ceiling,
    rounded: str,
) -> list[dict[str, Any]]:
    """Measure the steps of one shape, whose linear layers hold `rounded`."""
    name = _named(shape, rounded)
    graphs = (2,) if args.dry_run else graph_sizes(str(device), None)
    plan = Plan(tuple(args.batches), args.context, args.prompt, args.steps, graphs, rounded)
    bench = Bench.start(shape, device, dtype, plan)
    found = [{"shape": name, "what": "warm-up", "step_ms": bench.warm_up_s * 1e3}]
    for rows in tqdm(plan.batches, desc=f"{name}, decodes", leave=False, file=sys.stderr):
        found.append({"shape": name, **bench.decode(rows, ceiling)})
    found.append({"shape": name, **bench.prefill(ceiling)})
    if args.traces is not None:
        for rows in (plan.batches[0], plan.batches[-1]):
            bench.decode(rows, ceiling, args.traces / f"trace-{name}-{rows}.json.gz")
    del bench
    gc.collect()
    if not args.dry_run:
        torch.accelerator.empty_cache()
    return found


def adapters(
    args: argparse.Namespace,
    shape: str,
    device: torch.device,
    dtype: torch.dtype,
    ceiling: Ceiling,
) -> list[dict[str, Any]]:
    """Measure decodes of 1, 8 and 64 rows with none, one and several adapters."""
    graphs = (2,) if args.dry_run else graph_sizes(str(device), None)
    batches = (2,) if args.dry_run else (1, 8, 64)
    plan = Plan(batches, args.context, args.context, args.steps, graphs)
    found = measure_adapters(shape, device, dtype, plan, ceiling, args.adapters)
    gc.collect()
    if not args.dry_run:
        torch.accelerator.empty_cache()
    return [{"shape": shape, **row} for row in found]


def _named(shape: str, rounded: str) -> str:
    return shape if rounded == PLAIN else f"{shape} {rounded}"


def server(args: argparse.Namespace, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Measure the whole server, and say how much longer its steps take than bare ones."""
    shape = "tiny" if args.dry_run else "1B"  # those that are written to disk
    flags = ["--device", "cpu"] if args.dry_run else []
    tokens = 4 if args.dry_run else 128
    found = measure_server(shape, folder(), args.clients, tokens, flags)
    for row in results:
        same = row["shape"] in (shape, "dry") and "step_ms" in row
        if same and row["what"].startswith(f"decode {args.clients} x"):
            found["over_bare"] = found["step_ms"] / row["step_ms"]
    return {"shape": shape, **found}


def peer(args: argparse.Namespace, name: str) -> list[dict[str, Any]]:
    """Measure another engine on the shape of 1B."""
    path = checkpoints.make("tiny" if args.dry_run else "L", folder() / "device-peer")
    return [{"shape": name, **row} for row in measure_peer(name, path, tuple(args.batches))]


def folder() -> Path:
    """Return where checkpoints are written, and found again by a later run."""
    return Path(tempfile.gettempdir()) / "tgi-trio-bench-device"


def report(results: list[dict[str, Any]], facts: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the table of what has been measured, and what is written."""
    rows = [[row.get(name, "-") for name in COLUMNS] for row in results]
    told = ", ".join(f"{name} {value}" for name, value in facts.items())
    return f"{told}\n{table(COLUMNS, rows)}", {**facts, "results": results}


if __name__ == "__main__":
    main()
