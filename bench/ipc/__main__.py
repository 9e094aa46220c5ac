"""`python -m bench.ipc`: the transport beside its peers and the floor of the machine, in one run.

Round trips, µs, p50 / p99 / p99.9. Under a payload: back to back. idle: 3 ms of silence before a
send, so both sides sleep. work: the peer computes for exactly 3 ms, which is taken off. Both send
1 KiB. pinned: one core per side.
Optional peers: pip install 'tgi-trio[peers]'; without them the table says so. Run it on a quiet
machine (`chrt -r 1 python -m bench.ipc` keeps other load out of the tails).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench.harness.stats import add_output_flags, machine, reporting
from bench.ipc import extras, floor, ours, peers, report
from bench.ipc.sampling import Budget, Placement, Row

FULL = Budget(hot_samples=4000, hot_seconds=0.4, slow_samples=150)
QUICK = Budget(hot_samples=500, hot_seconds=0.1, slow_samples=20)
Measure = Callable[[Placement, Budget], list[Row]]


def measures() -> dict[str, Measure]:
    """Return every transport by name, the floor first."""

    def ring(variant: ours.Variant, place: Placement, budget: Budget) -> list[Row]:
        return ours.measure(variant, place, budget)

    rings: dict[str, Measure] = {v.name: partial(ring, v) for v in ours.VARIANTS}
    return {"C floor": floor.measure, **rings, **peers.PEERS}


def run_round_trips(
    transports: list[str], budget: Budget, rows: list[Row], notes: list[str]
) -> None:
    """Measure transports, pinned and free; what cannot be measured becomes a note."""
    jobs = [(pinned, name) for pinned in (True, False) for name in transports]
    for pinned, name in (bar := tqdm(jobs, desc="round trips", leave=False)):
        bar.set_postfix_str(name)
        place = Placement.choose(pinned)
        try:
            with place.here():
                rows += measures()[name](place, budget)
        except ImportError as error:
            notes.append(f"{name}: {error.name} is not installed (pip install 'tgi-trio[peers]')")
        except floor.NoCompiler as error:
            notes.append(f"{name}: {error}")


def run_extras(quick: bool, results: dict[str, Any], notes: list[str]) -> None:
    """Measure what is not a round trip."""
    spare_mib = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    sizes = [
        size for size in (1, 1024, 4096) if size * 1.5 < spare_mib and not (quick and size > 1)
    ]
    if sizes[-1] < 4096:
        notes.append(f"death: the largest victim is {sizes[-1]} MiB here")
    place = Placement.choose(True)

    def gap() -> dict[str, Any]:
        with place.here():
            return extras.step_gap(place, 300 if quick else 4000)

    jobs: dict[str, Callable[[], Any]] = {
        "decode": extras.decode_reply,
        "gap": gap,
        "idle": partial(extras.idle, 1.0 if quick else 10.0),
        "death": lambda: [extras.death(size, 1 if quick else 5) for size in sizes],
        "broadcast": lambda: [
            extras.broadcast(followers, payload, 50 if quick else 400)
            for followers in ((2,) if quick else (2, 4, 8))
            for payload in ((1024,) if quick else (1024, 262144))
        ],
    }
    for name in (bar := tqdm(jobs, desc="extras", leave=False)):
        bar.set_postfix_str(name)
        results[name] = jobs[name]()


def summary(rows: list[Row], results: dict[str, Any], notes: list[str]) -> tuple[str, Any]:
    """Return the tables and what is written."""
    judged, left_out = report.goals(rows, results)
    parts = [report.round_trip_table(rows, pinned) for pinned in (True, False)]
    parts += [report.extras_tables(results), report.goals_table(judged)]
    missing = [f"not measured: {note}" for note in dict.fromkeys((*notes, *left_out))]
    written = {
        "rows": [asdict(row) for row in rows],
        "extras": results,
        "goals": [asdict(goal) | {"verdict": goal.verdict} for goal in judged],
        "notes": notes,
    }
    return "\n".join(["\n\n".join(parts), *missing]), written


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m bench.ipc", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_output_flags(parser)
    parser.add_argument("--plot", type=Path, help="also draw the results to this PNG")
    parser.add_argument("--quick", action="store_true", help="few samples, small victims")
    parser.add_argument(
        "--transports", nargs="+", choices=measures(), default=list(measures()), metavar="NAME"
    )
    arguments = parser.parse_args()

    rows: list[Row] = []
    results: dict[str, Any] = {}
    notes: list[str] = []
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    with reporting(arguments.json, "ipc", partial(summary, rows, results, notes)):
        run_round_trips(arguments.transports, QUICK if arguments.quick else FULL, rows, notes)
        run_extras(arguments.quick, results, notes)
    if arguments.plot:
        report.plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
