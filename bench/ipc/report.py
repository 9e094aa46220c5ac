"""Tables, goals and the plot of `python -m bench.ipc`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness.stats import table
from bench.ipc.sampling import PAYLOADS, Row

Extras = dict[str, Any]


def round_trip_table(rows: Sequence[Row], pinned: bool) -> str:
    """Return one line per transport; cells are p50 / p99 / p99.9 in µs."""
    chosen = [row for row in rows if row.pinned is pinned]
    columns = [("hot", payload) for payload in PAYLOADS] + [("idle", 1024), ("work", 1024)]
    lines = []
    for transport in dict.fromkeys(row.transport for row in chosen):
        cells = []
        for mode, payload in columns:
            # The C floor passes an 8-byte token: its cells stand under the smallest and 1 KiB.
            fits = (payload, 8) if mode != "hot" or payload == PAYLOADS[0] else (payload,)
            found = [
                row
                for row in chosen
                if (row.transport, row.mode) == (transport, mode) and row.payload in fits
            ]
            cells.append(
                " / ".join(map(_us, (found[0].p50, found[0].p99, found[0].p99_9))) if found else ""
            )
        lines.append((transport, *cells))
    header = [_size(payload) if mode == "hot" else mode for mode, payload in columns]
    return table(("pinned" if pinned else "not pinned", *header), lines)


def _us(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _size(payload: int) -> str:
    return f"{payload} B" if payload < 1024 else f"{payload // 1024} KiB"


@dataclass(frozen=True)
class Goal:
    """One line of the goals table; `measured` and `limit` in the unit that `what` names."""

    what: str
    measured: float
    limit: float

    @property
    def verdict(self) -> str:
        return "met" if self.measured <= self.limit else "MISSED"


def goals(rows: Sequence[Row], extras: Extras) -> tuple[list[Goal], list[str]]:
    """Return the goals that this run can judge, and why it cannot judge the others."""
    judged: list[Goal] = []
    left_out: list[str] = []

    def p50(transport: str, mode: str, payload: int) -> float:
        found = [
            row.p50
            for row in rows
            if row.transport.startswith(transport)
            and (row.mode, row.payload, row.pinned) == (mode, payload, True)
        ]
        if not found:
            raise LookupError(f"no {transport} row")
        return min(found)

    def judge(what: str, limit: float, measure: Callable[[], float]) -> None:
        try:
            judged.append(Goal(what, round(measure(), 3), limit))
        except LookupError as missing:
            left_out.append(f"{what}: {missing}")

    def percent_of_grpc(transport: str) -> float:
        return 100 * p50(transport, "hot", 1024) / p50("gRPC", "hot", 1024)

    judge(
        "hot round trip, 1 KiB, both awake: p50, % of best gRPC",
        1.5,
        lambda: percent_of_grpc("ring, both spin"),
    )
    judge(
        "router stays an event loop, shard awake: p50, % of best gRPC",
        4.0,
        lambda: percent_of_grpc("ring, event loop"),
    )
    judge(
        "dispatch while both sleep: times the C eventfd floor",
        4.0,
        lambda: p50("ring, both sleep", "idle", 1024) / p50("C eventfd", "idle", 8),
    )
    judge("decode reply, 128 rows, encode + read: µs", 6.0, lambda: extras["decode"]["total_us"])
    judge("step gap, 1 ms steps, 512 streams: p50 µs", 10.0, lambda: extras["gap"]["p50_us"])
    judge("step gap, 1 ms steps, 512 streams: p99 µs", 50.0, lambda: extras["gap"]["p99_us"])
    judge("death noticed, largest victim: µs", 1000.0, lambda: extras["death"][-1]["mutex_us"])
    judge(
        "idle: CPU % of router + shard",
        0.05,  # what rounds to 0.0
        lambda: max(extras["idle"]["router_percent"], extras["idle"]["shard_percent"]),
    )
    return judged, left_out


def goals_table(judged: Sequence[Goal]) -> str:
    """Return goals, measured values and verdicts."""
    rows = [(goal.what, _us(goal.measured), goal.limit, goal.verdict) for goal in judged]
    return table(("goal", "measured", "at most", "verdict"), rows)


def extras_tables(extras: Extras) -> str:
    """Return the tables of what is not a round trip."""
    parts = []
    for name, value in extras.items():
        results = value if isinstance(value, list) else [value]
        cells = [[_us(v) if isinstance(v, float) else v for v in r.values()] for r in results]
        parts.append(f"{name}\n" + table(tuple(results[0]), cells))
    return "\n\n".join(parts)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw p50 over payload (pinned, hot) and p50 to p99 of 1 KiB in every mode."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pinned = [row for row in rows if row.pinned]
    names = list(dict.fromkeys(row.transport for row in pinned))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5.5))
    for number, name in enumerate(names):
        hot = [row for row in pinned if row.transport == name and row.mode == "hot"]
        style = {"color": f"C{number}", "linestyle": "-" if name.startswith("ring") else "--"}
        if len(hot) == 1:
            left.axhline(hot[0].p50, label=name, linewidth=0.8, **style)
        else:
            left.plot([r.payload for r in hot], [r.p50 for r in hot], "o", label=name, **style)
    left.set_xscale("log", base=2)
    left.set_xticks(PAYLOADS, [_size(payload) for payload in PAYLOADS])
    left.set_title("round trip back to back, p50, pinned")
    left.set_ylabel("µs")
    left.legend(fontsize=8)
    positions = {name: number for number, name in enumerate(reversed(names))}
    for offset, mode in enumerate(("hot", "idle", "work")):
        chosen = [row for row in pinned if row.mode == mode and row.payload in (8, 1024)]
        where = [positions[row.transport] + 0.25 * (1 - offset) for row in chosen]
        right.hlines(where, [r.p50 for r in chosen], [r.p99 for r in chosen], color=f"C{offset}")
        right.plot([r.p50 for r in chosen], where, "|", color=f"C{offset}", label=mode, mew=3)
    right.set_yticks(list(positions.values()), list(positions))
    right.set_title("1 KiB, p50 (tick) to p99 (line end), pinned")
    right.set_xlabel("µs")
    right.legend(fontsize=8)
    left.set_yscale("log")
    right.set_xscale("log")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"written: {path}")
