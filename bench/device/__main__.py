"""Steps on a device beside its roofline, measured in the same run.

    python -m bench.device --shapes 8B 1B --json bench/out/device.json --traces bench/out

For each shape, made on the device with random weights, plain and quantised: the warm-up,
decodes of each batch size with the gap between steps, a long prefill; the whole server over
the bare step, and over a device that breaks under it; decodes of rows with LoRA
adapters; peers where they are installed. `of roofline` is the least time that memory (for
weights as they are stored) and matrix units would need,
as measured here, as a part of what the step took; `gap_us` is what a step takes beyond its bare
recording. Each part is a process of its own with a time of its
own, so that one that fails costs no other, and the most valuable come first; what is found is
written at once, to `--json` after each part and row by row beside it. `bash bench/device/kit.sh`
does all of it, and tests, within two times ten minutes. Every row has random tokens of its own,
behind a context of random K and V, so what a mixture's rows choose, and what attention reads, is
what those of a server do; a mixture's `least_ms` is for as many experts as even odds would choose.
`--dry-run` runs everything over a device that is not there, tiny: its times mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

from bench.device.parts import Part, Row, append_row, choose_parts, read_rows, run_parts
from bench.device.shapes import LONG
from bench.device.state_shapes import STATES
from bench.harness.stats import add_output_flags, machine, table

if TYPE_CHECKING:  # it takes seconds to import, and the process that starts the others never does
    import torch

    from bench.device.roofline import Ceiling

COLUMNS: Final = [
    *("shape", "what", "step_ms", "replay_ms", "gap_us", "host_ms", "least_ms", "of_roofline"),
    *("gb_per_s", "tflop_per_s", "over_bare", "error", "over_built_in", "left_out", "why"),
]
ROUNDED: Final = ("int4", "q4_k", "fp8", "exl3")
SHAPES: Final = ("dry", "tiny", "1B", "8B", "mixture", *LONG, *STATES)
CHUNKS: Final = (48, 192, 448)  # of a prompt, beside decodes
FEW_BATCHES: Final = (1, 16, 64)  # of shapes that have an index or a state
_STEPS: Final = 32  # of each decode


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=["8B", "1B"], choices=SHAPES)
    parser.add_argument(
        "--weights",
        nargs="+",
        default=["plain", *ROUNDED],
        help="what linear layers hold: numbers of the dtype (plain), codes of --quantize, or exl3",
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64, 256, 4, 16, 128])
    parser.add_argument("--adapters", type=int, default=8, help="different ones, at most; 0: none")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--long-context", type=int, default=32768, help=f"of {', '.join(LONG)}")
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=_STEPS, help="of each decode")
    parser.add_argument(
        "--server", default="8B", help="shape of the whole server's model; '': none"
    )
    parser.add_argument("--clients", type=int, default=64, help="of the whole server")
    parser.add_argument("--peers", action="store_true", help="measure what else is installed")
    parser.add_argument("--budget", type=float, default=420.0, help="seconds for all parts")
    parser.add_argument("--traces", type=Path, help="folder of Chrome traces of a few steps")
    parser.add_argument("--dry-run", action="store_true", help="tiny, over a stand-in device")
    parser.add_argument("--only", nargs="+", help="parts by their names, and peers; all others not")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # of a process that measures one
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    add_output_flags(parser)
    args = parser.parse_args(argv)
    if args.dry_run:
        shrink(args)
    return args


def shrink(args: argparse.Namespace) -> None:
    """Make what is measured as small as it can be."""
    own = (*LONG, *STATES, "mixture")
    args.shapes = [*(f"dry {shape}" for shape in args.shapes if shape in own), "dry"]
    args.batches, args.context, args.prompt = [1, 2], 6, 8
    args.weights, args.adapters = ["plain", "int4", "exl3"], 2
    args.server, args.clients, args.steps = "tiny", 2, 1


def main(argv: Sequence[str] | None = None) -> int:
    """Measure part by part, print, write; return an exit code: 1 where a part has failed."""
    words = sys.argv[1:] if argv is None else list(argv)
    args = parse(words)
    if args.part is not None:
        run_part(args, Part(**json.loads(args.part)))
        return 0
    with tempfile.TemporaryDirectory() as place:
        rows = Path(place) / "rows.jsonl"
        if args.json is not None:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            rows = args.json.with_suffix(".jsonl")
            rows.unlink(missing_ok=True)
        if args.dry_run:  # what a part costs others is no question then, and imports take seconds
            args.rows = rows
            for part in _parts(args):
                run_part(args, part)
            write(read_rows(rows), args.json)
        else:
            run_parts(
                _parts(args),
                lambda part: command(words, part, rows),
                rows,
                args.budget,
                lambda found: write(found, args.json),
            )
        found = read_rows(rows)
    values = [[row.get(name, "-") for name in COLUMNS] for row in found]
    print(table(COLUMNS, values))
    return int(any("why" in row for row in found))


def write(rows: list[Row], path: Path | None) -> None:
    """Write what has been found by now; that of the device itself is a row of "facts"."""
    if path is None:
        return
    facts = next((row for row in rows if row["what"] == "facts"), {})
    told = {name: value for name, value in facts.items() if name not in ("shape", "what")}
    results = [row for row in rows if row["what"] != "facts"]
    document = {"schema": 2, "bench": "device", "machine": machine(), **told, "results": results}
    path.write_text(json.dumps(document, indent=1) + "\n")


def _parts(args: argparse.Namespace) -> list[Part]:
    peers: list[str] = []
    if args.peers:
        from bench.device.peers import installed

        peers = installed()
    every = choose_parts(
        args.shapes, args.weights, adapters=args.adapters > 0, server=args.server, peers=peers
    )
    if args.only is None:
        return every
    if unknown := set(args.only).difference(part.name for part in every):
        sys.exit(f"no part is called {unknown.pop()}: {', '.join(part.name for part in every)}")
    return [part for part in every if part.name in args.only or part.kind == "peer"]


def command(words: Sequence[str], part: Part, rows: Path) -> list[str]:
    """Return the command line of the process that measures a part."""
    argv = [sys.executable, "-m", "bench.device", *words]
    return [*argv, "--part", json.dumps(asdict(part)), "--rows", str(rows)]


# --- a part ------------------------------------------------------------------------------------


def run_part(args: argparse.Namespace, part: Part) -> None:
    """Measure one part in this process; its rows go to `args.rows`."""
    if part.kind in ("server", "break"):
        append_row(args.rows, {"shape": part.shape, **_serve(args, part)})
        return
    if part.kind == "peer":
        for row in peer(args, part.name):
            append_row(args.rows, {"shape": part.name, **row})
        return
    if part.kind == "tiles":
        with _device(args, computes=True) as (device, dtype, _):
            for row in tiles(args, part, device, dtype):
                append_row(args.rows, {"shape": part.name, **row})
        return
    with _device(args) as (device, dtype, ceiling):
        measure = steps if part.kind == "steps" else adapters
        for row in measure(args, part, device, dtype, ceiling):
            append_row(args.rows, {"shape": part.name, **row})


@contextmanager
def _device(
    args: argparse.Namespace, *, computes: bool = False
) -> Iterator[tuple[torch.device, torch.dtype, Ceiling]]:
    """Yield the device, the dtype of what is measured and what the device can do.

    `computes`: in a dry run as well, where otherwise nobody looks at what is computed.
    """
    with ExitStack() as stack:
        if args.dry_run:
            os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
            from tgi_trio.shard.torch_backend.attention.paged import split_kv
            from tgi_trio.testing.quick_interpreter import hurry
            from tgi_trio.testing.stand_in_device import StandInDevice

            hurry()
            # An interpreter has one program at a time.
            stack.enter_context(mock.patch.object(split_kv, "_PROGRAMS", 4))
            stand_in = stack.enter_context(StandInDevice())
            if not computes:
                stack.enter_context(stand_in.idle())
        import torch

        from bench.device.roofline import measure_ceiling
        from bench.device.timing import Timer
        from tgi_trio.shard.machine.accelerator import current_device, current_kind, find_name

        if not (kind := current_kind()):
            sys.exit("torch sees no device here; --dry-run tries the benchmark without one")
        device = current_device(kind)
        dtype = torch.float32 if args.dry_run else torch.bfloat16  # Triton interprets no bfloat16
        timer = Timer(device, 2 if args.dry_run else 20)
        ceiling = measure_ceiling(timer, dtype, small=args.dry_run)
        facts = {
            "device": find_name(device),
            "torch": torch.__version__,
            "gb_per_s": ceiling.bytes_per_second / 1e9,
            "tflop_per_s": ceiling.operations_per_second / 1e12,
        }
        append_row(args.rows, {"shape": "", "what": "facts", **facts})
        yield device, dtype, ceiling


def steps(
    args: argparse.Namespace,
    part: Part,
    device: torch.device,
    dtype: torch.dtype,
    ceiling: Ceiling,
) -> Iterator[Row]:
    """Measure the steps of one shape; traces come last."""
    from bench.device.choices import ROWS, leave_out, tell_chosen
    from bench.device.steps import Bench, Plan
    from tgi_trio.shard.machine.device import graph_sizes

    graphs = (2,) if args.dry_run else graph_sizes(str(device), None)
    batches, context = tuple(args.batches), args.context
    if part.without and not args.dry_run:
        batches = ROWS
    if part.shape in (*LONG, *STATES):
        batches = FEW_BATCHES
    if part.shape in LONG:
        context = args.long_context
    plan = Plan(
        *(batches, context, args.prompt, args.steps, graphs, part.rounded), invariant=part.invariant
    )
    with leave_out(part.without):
        bench = Bench.start(part.shape, device, dtype, plan)
    chosen = tell_chosen(bench.runner)
    took = bench.warm_up["warm_up_s"] * 1e3
    yield {"what": "warm-up", "step_ms": took, **bench.warm_up, **chosen}
    for rows in plan.batches:
        yield bench.decode(rows, ceiling)
        if rows == plan.batches[0] and not part.without:
            yield bench.prefill(ceiling)
    for chunk in () if part.without else (2,) if args.dry_run else CHUNKS:
        yield bench.mixed(chunk, ceiling, recorded=True)
        yield bench.mixed(chunk, ceiling, recorded=False)
    if args.traces is not None and not part.without:
        name = part.name.replace(" ", "-")
        for rows in (min(plan.batches), max(plan.batches)):
            bench.decode(rows, ceiling, args.traces / f"trace-{name}-{rows}.json.gz")
        bench.prefill(ceiling, args.traces / f"trace-{name}-prefill.json.gz")


def adapters(
    args: argparse.Namespace,
    part: Part,
    device: torch.device,
    dtype: torch.dtype,
    ceiling: Ceiling,
) -> Iterator[Row]:
    """Measure decodes of 1, 8 and 64 rows with none, one and several adapters."""
    from bench.device.adapters import measure_adapters
    from bench.device.steps import Plan
    from tgi_trio.shard.machine.device import graph_sizes

    graphs = (2,) if args.dry_run else graph_sizes(str(device), None)
    batches = (2,) if args.dry_run else (1, 8, 64)
    plan = Plan(batches, args.context, args.context, args.steps, graphs)
    yield from measure_adapters(part.shape, device, dtype, plan, ceiling, args.adapters)
    gc.collect()


def tiles(
    args: argparse.Namespace, part: Part, device: torch.device, dtype: torch.dtype
) -> Iterator[Row]:
    """Measure a layer with other tiles than are built in."""
    from bench.device.alternatives import measure_alternatives

    yield from measure_alternatives(part.shape, device, dtype, small=args.dry_run)


def _serve(args: argparse.Namespace, part: Part) -> Row:
    """Measure the whole server; say how much longer its steps take than bare ones."""
    from bench.device.server import measure_break, measure_server

    flags = ["--device", "cpu", "--cpu-backend", "torch"] if args.dry_run else []
    # A tiny model's streams are long enough to run at once on a busy machine, too.
    tokens, context = (48, 64) if args.dry_run else (128, args.context)
    folder = _folder() / part.shape
    if part.kind == "break":
        return measure_break(part.shape, folder, 256, flags)
    found = measure_server(part.shape, folder, args.clients, context, tokens, flags)
    for row in read_rows(args.rows):
        if row["shape"] == part.shape and row["what"].startswith(f"decode {args.clients} x"):
            found["over_bare"] = found["step_ms"] / row["step_ms"]
    return found


def peer(args: argparse.Namespace, name: str) -> list[dict[str, Any]]:
    """Measure another engine on the shape of 1B."""
    from bench.device.peers import measure_peer
    from bench.harness import checkpoints

    path = checkpoints.make("tiny" if args.dry_run else "L", _folder() / "peer")
    return measure_peer(name, path, tuple(args.batches))


def _folder() -> Path:
    """Return where models are written, and found again by a later run."""
    return Path(tempfile.gettempdir()) / "tgi-trio-bench-device"


if __name__ == "__main__":
    sys.exit(main())
