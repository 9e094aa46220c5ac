"""The HTTP front end: what an event and a request cost, beside FastAPI + uvicorn and stock parts.

    python -m bench.http --json bench/out/http.json --plot bench/out/http.png

Every server is a process on core 0, the client runs on core 1, and all of them are measured in
turns within one run. Costs are CPU time of the server (`schedstat`) per event or request, so they
hold on a machine that others use too; rates are what one full core would reach at that cost. The
floor is a loop that writes ready-made bytes to the sockets: nothing in Python could cost less.
FastAPI needs `pip install tgi-trio[peers]` and is left out where it is missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench.harness import stats
from bench.harness.vitals import cpu_seconds
from bench.http import load_generator
from bench.http.load_generator import Load
from tgi_trio.testing.ports import reserve_port

ENDLESS = 10**9
SERVER_CORE, CLIENT_CORE = 0, 1
GRACE = 2.0  # seconds, of every server
_START_S = 240.0  # that a server may take to be there


@dataclass(frozen=True)
class Case:
    """One load, put on every server in turn."""

    name: str
    connections: int
    path: str
    tokens: int  # per request
    paced: bool = False


CASES = (
    Case("stream 64", 64, "/generate_stream", ENDLESS),
    Case("stream 128", 128, "/generate_stream", ENDLESS),
    Case("paced 512", 512, "/generate_stream", ENDLESS, paced=True),
    Case("unary 32", 32, "/generate", 1),
    Case("short 64", 64, "/generate_stream", 32),
)


@dataclass
class Point:
    """One measurement."""

    case: str
    server: str
    events_per_s: float
    requests_per_s: float
    core: float  # part of a core the server used
    us_per_event: float
    us_per_request: float
    age_p50_ms: float  # from the step to the client
    age_p99_ms: float
    answer_p50_ms: float
    answer_p99_ms: float
    errors: int

    @property
    def events_per_core(self) -> float:
        """Events per second that a full core would carry."""
        return 1e6 / self.us_per_event if self.us_per_event else 0.0


@contextmanager
def server(kind: str, paced: bool) -> Iterator[tuple[int, int]]:
    """Run a server on its core; yields (port, pid)."""
    mode = "paced" if paced else "lockstep"
    with reserve_port() as port:
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.http.servers", kind, str(port), mode],
            preexec_fn=lambda: os.sched_setaffinity(0, {SERVER_CORE}),
            stderr=subprocess.DEVNULL,
        )
        try:
            deadline = time.monotonic() + _START_S
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), 0.2).close()
                    break
                except OSError:
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise RuntimeError(f"the server {kind} did not start") from None
                    time.sleep(0.05)
            yield port, process.pid
        finally:
            process.kill()
            process.wait()


def resident(pid: int) -> int:
    """Return the resident bytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def percentile(values: list[float], part: float) -> float:
    """Return a percentile in milliseconds; 0 when there are no values."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * part), len(ordered) - 1)] * 1e3 if ordered else 0.0


def measure(case: Case, kind: str, seconds: float) -> Point:
    """Put one case's load on one server."""
    with server(kind, case.paced) as (port, pid):
        used = 0.0

        def started() -> None:
            nonlocal used
            used = cpu_seconds(pid)

        load: Load = load_generator.run(
            port, case.connections, case.path, case.tokens, 0.7, seconds, started, case.paced
        )
        used = cpu_seconds(pid) - used
    return Point(
        case=case.name,
        server=kind,
        events_per_s=load.events / load.seconds,
        requests_per_s=load.requests / load.seconds,
        core=used / load.seconds,
        us_per_event=used / load.events * 1e6 if load.events else 0.0,
        us_per_request=used / load.requests * 1e6 if load.requests else 0.0,
        age_p50_ms=percentile(load.ages, 0.5),
        age_p99_ms=percentile(load.ages, 0.99),
        answer_p50_ms=percentile(load.times, 0.5),
        answer_p99_ms=percentile(load.times, 0.99),
        errors=load.errors,
    )


def median_point(points: list[Point]) -> Point:
    """Return the medians of several measurements of one case and server."""
    names = [name for name, value in vars(points[0]).items() if isinstance(value, float)]
    medians = {name: statistics.median(getattr(p, name) for p in points) for name in names}
    errors = sum(point.errors for point in points)
    return Point(case=points[0].case, server=points[0].server, errors=errors, **medians)


# ---- clients that never read -------------------------------------------------------------------


def memory_per_stream(kind: str, open_streams: Callable[..., list[socket.socket]]) -> float:
    """Return by how many bytes a server grows per stream that is never read."""
    count = 32
    with server(kind, False) as (port, pid):
        load_generator.run(port, 4, "/generate_stream", 32, 0.2, 0.3)  # everything is imported
        before = resident(pid)
        sockets = open_streams(port, count, ENDLESS)
        most = before
        for _ in range(60):
            time.sleep(0.05)
            most = max(most, resident(pid))
        for sock in sockets:
            sock.close()
    return (most - before) / count


def exit_after_sigterm(kind: str) -> float | None:
    """Return the seconds from SIGTERM to exit with readers that never read; None: not within 10."""
    with server(kind, False) as (port, pid):
        # More than the kernel's buffers take, less than what has a stream aborted.
        sockets = load_generator.stuck(port, 8, 8000)
        time.sleep(1.0)
        began = time.perf_counter()
        os.kill(pid, signal.SIGTERM)
        gone = None
        while time.perf_counter() - began < 10 and gone is None:
            time.sleep(0.02)
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state == "Z":
                gone = time.perf_counter() - began
        for sock in sockets:
            sock.close()
    return gone


# ---- what it comes to --------------------------------------------------------------------------


def goals(points: dict[tuple[str, str], Point], extra: dict[str, Any]) -> list[list[object]]:
    """Return a row per goal: what, goal, reached, whether that is enough."""
    rows: list[list[object]] = []

    def add(what: str, goal: str, reached: str, good: bool) -> None:
        rows.append([what, goal, reached, "yes" if good else "NO"])

    def ratio(case: str, other: str) -> float:
        return points[case, other].us_per_event / points[case, "ours"].us_per_event

    peers = ("stream 64", "fastapi") in points
    for case in ("stream 64", "stream 128"):
        if peers:
            found = ratio(case, "fastapi")
            add(f"events per core, {case}", ">= 1.4 x FastAPI", f"{found:.2f} x", found >= 1.4)
        found = ratio(case, "stock")
        add(f"events per core, {case}", ">= 4 x stock", f"{found:.2f} x", found >= 4)
    paced = points["paced 512", "ours"]
    add("512 streams x 100/s: core", "<= 35 %", f"{paced.core * 100:.0f} %", paced.core <= 0.35)
    late = paced.age_p99_ms
    add("512 streams x 100/s: step to client p99", "<= 5 ms", f"{late:.1f} ms", late <= 5)
    cost, base = (points["unary 32", kind].us_per_request for kind in ("ours", "stock"))
    add("unary request", "<= 0.5 x stock", f"{cost / base:.2f} x", cost <= base / 2)
    if peers:
        found = ratio("short 64", "fastapi")
        add("answers of 32 tokens, per core", ">= FastAPI", f"{found:.2f} x", found >= 1)
    for name in ("HTTP/1.1", "HTTP/2"):
        grown = extra["bytes per never-read stream"][name]["ours"]
        bound = 1.5 * 2**20
        add(f"never-reading, {name}", "<= 1.5 MiB", f"{grown / 2**20:.2f} MiB", grown <= bound)
    gone = extra["seconds from SIGTERM to exit"]["ours"]
    reached = "not at all" if gone is None else f"{gone:.1f} s"
    good = gone is not None and gone <= GRACE + 2
    add("SIGTERM, stuck readers", f"<= {GRACE + 2:.0f} s", reached, good)
    return rows


def plot(path: Path, points: list[Point]) -> None:
    """Draw the cost of an event or request of every server in every case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = list(dict.fromkeys(point.server for point in points))
    cases = list(dict.fromkeys(point.case for point in points))
    figure, axes = pyplot.subplots(1, len(cases), figsize=(3 * len(cases), 4))
    for axis, case in zip(axes, cases, strict=True):
        unary = case.startswith("unary")
        here = {point.server: point for point in points if point.case == case}
        values = [here[k].us_per_request if unary else here[k].us_per_event for k in kinds]
        bars = axis.bar(kinds, values, color=[f"C{i}" for i in range(len(kinds))])
        axis.bar_label(bars, fmt="%.3g")
        axis.set_title(case)
        axis.set_ylabel("CPU µs per request" if unary else "CPU µs per event")
        axis.tick_params(axis="x", rotation=45)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"written: {path}")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="bench.http", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=2.0, help="measured time of one point")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each point")
    parser.add_argument("--plot", type=Path, help="also draw the costs into this file")
    parser.add_argument("--cases", nargs="+", help="only these loads; without goals")
    parser.add_argument("--servers", nargs="+", help="only these servers; without goals")
    stats.add_output_flags(parser)
    return parser.parse_args()


def servers() -> list[str]:
    """Return the servers that can be measured here."""
    kinds = ["ours", "ours-plain", "ours-quart", "stock", "floor"]
    if all(importlib.util.find_spec(name) for name in ("fastapi", "uvicorn", "uvloop")):
        kinds.append("fastapi")
    return kinds


@dataclass
class Measured:
    """What is known so far."""

    points: dict[tuple[str, str], list[Point]] = field(default_factory=dict)  # by case and server
    extra: dict[str, Any] = field(default_factory=dict)

    def put_loads(self, cases: list[Case], kinds: list[str], seconds: float, repeats: int) -> None:
        """Put every load on every server in turn, `repeats` times."""
        runs = [(case, kind) for _ in range(repeats) for case in cases for kind in kinds]
        for case, kind in tqdm(runs, desc="loads", unit="run"):
            self.points.setdefault((case.name, kind), []).append(measure(case, kind, seconds))

    def go_to_extremes(self) -> None:
        """See what clients that never read do to the servers' memory and to their end."""
        protocols = {"HTTP/1.1": load_generator.stuck, "HTTP/2": load_generator.stuck_h2}
        memory: dict[str, dict[str, float]] = {}
        for name, opener in tqdm(protocols.items(), desc="never read"):
            memory[name] = {kind: memory_per_stream(kind, opener) for kind in ("ours", "stock")}
        self.extra["bytes per never-read stream"] = memory
        self.extra["seconds from SIGTERM to exit"] = {
            kind: exit_after_sigterm(kind) for kind in tqdm(("ours", "stock"), desc="SIGTERM")
        }

    def medians(self) -> dict[tuple[str, str], Point]:
        """Return the medians of each case's and server's measurements."""
        return {key: median_point(each) for key, each in self.points.items()}

    def summary(self) -> tuple[str, dict[str, Any]]:
        """Return the tables, and what is written; goals are judged when all is known."""
        points = self.medians()
        columns = ("events_per_core", "core", "us_per_event", "us_per_request", "age_p50_ms",
                   "age_p99_ms", "answer_p50_ms", "answer_p99_ms", "errors")  # fmt: skip
        rows = [[p.case, p.server, *(getattr(p, c) for c in columns)] for p in points.values()]
        text = stats.table(("case", "server", *columns), rows)
        results: dict[str, Any] = {
            "points": [{**vars(p), "events_per_core": p.events_per_core} for p in points.values()]
        }
        if self.extra:
            results["extra"] = self.extra
        if len(self.extra) == 2:
            judged = results["goals"] = goals(points, self.extra)
            text += "\n\n" + stats.table(("what", "goal", "reached", "met"), judged)
        return text, results


def main() -> None:
    """Run the benchmark."""
    arguments = parse_arguments()
    os.sched_setaffinity(0, {min(CLIENT_CORE, (os.cpu_count() or 1) - 1)})
    cases = [case for case in CASES if case.name in (arguments.cases or [case.name])]
    kinds = [kind for kind in servers() if kind in (arguments.servers or [kind])]
    measured = Measured()
    with stats.reporting(arguments.json, "http", measured.summary):
        measured.put_loads(cases, kinds, arguments.seconds, arguments.repeats)
        if not arguments.cases and not arguments.servers:
            measured.go_to_extremes()
    if arguments.plot is not None:
        plot(arguments.plot, list(measured.medians().values()))


if __name__ == "__main__":
    main()
