"""Chaos: random faults under load, and the books afterwards.

    python -m tests.stress.chaos --faults 200                  # a shard without a model
    python -m tests.stress.chaos --faults 50 --demo            # the embedded model

Clients stream all the time. Each checks its own answer: tokens in order, none missing or twice, the
text of an undisturbed run, one terminal event. The faults are those of `chaos_faults.py`, one
after the other; after each the server has to be ready again and serve. At the end nothing may be
left over: requests, KV blocks, descriptors, processes, shared memory.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import trio
from tqdm import tqdm

from bench.harness import stats
from bench.harness.server import mortal, wait_healthy
from bench.harness.stats import Summary
from bench.harness.vitals import children, metrics, still_running, vitals
from tests.stress.chaos_faults import FAULTS, STALL_TIMEOUT, Fault, Victim, grammar_bombs
from tgi_trio.client.address import parse_address
from tgi_trio.client.http import Client, HTTPFailure
from tgi_trio.testing.ports import reserve_port
from tgi_trio.testing.segments import names_in_shm, names_left

RECOVERY = 120.0  # seconds until the server serves again after a fault, on a busy machine
REST = 60.0  # seconds until it holds no more than before
PROBE_PERIOD = 0.05  # seconds between two looks at /live
FAKE = '{"step_ms": 2}'
FLAGS = (
    *("--hostname", "127.0.0.1", "--stall-timeout", f"{STALL_TIMEOUT:g}"),
    *("--max-concurrent-requests", "64", "--validation-workers", "2"),
    *("--shard-restart-limit", "1000"),  # we crash it far more often than chance would
)


@dataclass
class Story:
    """What happened to the clients of the load."""

    finished: int = 0
    refused: int = 0  # 429: not accepted
    problems: Counter[str] = field(default_factory=Counter)
    live_ms: list[float] = field(default_factory=list)  # answers of /live


@dataclass
class Report:
    """What a run has found; `problems` is empty when nothing was wrong."""

    faults: dict[str, int] = field(default_factory=dict)
    recovery_s: dict[str, Summary] = field(default_factory=dict)
    live_ms: Summary = field(default_factory=lambda: Summary.of([]))
    finished: int = 0
    refused: int = 0
    sent_by_faults: int = 0
    answers_to_faults: dict[str, int] = field(default_factory=dict)
    accepted: int = 0
    ended: dict[str, int] = field(default_factory=dict)
    restarts: int = 0
    problems: dict[str, int] = field(default_factory=dict)


class Chaos:
    """One run against one server."""

    def __init__(self, pid: int, port: int, seed: int, clients: int) -> None:
        self.rng = random.Random(seed)
        self.victim = Victim(pid, "127.0.0.1", port, random.Random(seed + 1))
        self.client = Client(parse_address(f"http://127.0.0.1:{port}"))
        self.story = Story()
        self.faults: Counter[str] = Counter()
        self.recovery: dict[str, list[float]] = {}
        self._clients = clients
        self._answers: dict[tuple[str, int], str] = {}

    # ---- the load ------------------------------------------------------------------------------

    async def ask(self, prompt: str, tokens: int) -> str:
        """Stream one answer and return its text. Raises ValueError for what is wrong with it."""
        body = {"inputs": prompt, "parameters": {"max_new_tokens": tokens}}
        text, seen = None, 0
        async for _, event in self.client.events("/generate_stream", body):
            if text is not None:
                raise ValueError("an event after the terminal one")
            if "error" in event:
                raise ValueError(f"failed: {event['error']}")
            seen += 1
            if event["index"] != seen:
                raise ValueError("a token is missing or came twice")
            text = event["generated_text"]
        if text is None:
            raise ValueError("no terminal event")
        return str(text)

    async def undisturbed(self) -> None:
        """Note the answers that the load will be held to; start what is started on demand."""
        await grammar_bombs(self.victim)
        for n in range(12):
            prompt, tokens = f"Question {n}: what does the ring do?", self.rng.randint(5, 120)
            self._answers[prompt, tokens] = await self.ask(prompt, tokens)

    async def load(self) -> None:
        """Ask one question after the other."""
        while True:
            (prompt, tokens), expected = self.rng.choice(list(self._answers.items()))
            try:
                text = await self.ask(prompt, tokens)
                if text != expected:
                    self.story.problems["another text than undisturbed"] += 1
                self.story.finished += 1
            except HTTPFailure as failure:
                if failure.status != 429:
                    self.story.problems[f"refused: {failure}"] += 1
                self.story.refused += 1
                await trio.sleep(0.1)
            except ValueError as error:
                self.story.problems[str(error)] += 1
            except (OSError, trio.BrokenResourceError):
                self.story.problems["the connection broke"] += 1

    async def probe(self) -> None:
        """Time /live."""
        while True:
            start = trio.current_time()
            await self.client.get("/live")
            self.story.live_ms.append(1e3 * (trio.current_time() - start))
            await trio.sleep(PROBE_PERIOD)

    # ---- the faults ----------------------------------------------------------------------------

    async def run(self, count: int) -> None:
        """Do `count` faults under load, then let everything come to rest."""
        async with trio.open_nursery() as nursery:
            for _ in range(self._clients):
                nursery.start_soon(self.load)
            nursery.start_soon(self.probe)
            for fault in tqdm(self.chosen(count), desc="faults", disable=None):
                self.faults[fault.__name__] += 1
                try:
                    await fault(self.victim)
                except* RuntimeError as group:
                    for error in group.exceptions:
                        self.story.problems[f"{fault.__name__}: {error}"] += 1
                await self.recover(fault.__name__)
            nursery.cancel_scope.cancel()

    def chosen(self, count: int) -> list[Fault]:
        """Return the faults of a run: each once, then by weight."""
        each = self.rng.sample(list(FAULTS), min(count, len(FAULTS)))
        return each + self.rng.choices(list(FAULTS), list(FAULTS.values()), k=count - len(each))

    async def recover(self, fault: str) -> None:
        """Wait until the server is ready, and the load gets answers again."""
        start, finished = trio.current_time(), self.story.finished
        with trio.move_on_after(RECOVERY) as scope:
            while self.story.finished <= finished or not await self.ready():
                await trio.sleep(0.02)
        if scope.cancelled_caught:
            self.story.problems[f"no recovery from {fault}"] += 1
        self.recovery.setdefault(fault, []).append(trio.current_time() - start)

    async def ready(self) -> bool:
        """Return what /ready says."""
        try:
            return bool((await self.client.get("/ready"))["ready"])
        except HTTPFailure:
            return False

    def tell(self, report: Report) -> None:
        """Write what is known so far into the report."""
        report.faults = dict(self.faults)
        report.recovery_s = {name: Summary.of(values) for name, values in self.recovery.items()}
        report.live_ms = Summary.of(self.story.live_ms)
        report.finished, report.refused = self.story.finished, self.story.refused
        report.sent_by_faults = self.victim.requests
        report.answers_to_faults = dict(self.victim.answers)
        report.problems = dict(self.story.problems)


# ---- the books -----------------------------------------------------------------------------------


def ends(books: dict[str, float]) -> dict[str, int]:
    """Return how the accepted requests ended."""
    return {
        "finished": int(books["tgi_request_finished"]),
        "failed": int(books["tgi_request_failed"]),
        "cancelled": int(sum(v for k, v in books.items() if k.startswith("tgi_request_cancelled"))),
    }


def at_rest(port: int) -> dict[str, float]:
    """Return the metrics once the books balance, or those after a minute.

    Blocks of a client that has left are free when the shard has acknowledged it.
    """
    deadline = time.monotonic() + REST
    while list(unbalanced(books := metrics(port))) and time.monotonic() < deadline:
        time.sleep(0.05)
    return books


def unbalanced(books: dict[str, float]) -> Iterator[str]:
    """Yield what is wrong with the books of a server at rest."""
    accepted, ended = int(books["tgi_request_accepted"]), sum(ends(books).values())
    if accepted != ended:
        yield f"{accepted} accepted, {ended} ended"
    free = books["tgi_kv_blocks_free"] + books["tgi_prefix_cache_blocks"]
    if free != books["tgi_kv_blocks_total"]:
        yield f"{free:g} of {books['tgi_kv_blocks_total']:g} KV blocks free or cached"


def descriptors_at_rest(pid: int, most: int) -> int:
    """Return the open descriptors of a process, after waiting for them to be `most` at most."""
    deadline = time.monotonic() + REST
    while (found := vitals(pid).descriptors) > most and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


@contextmanager
def server(demo: bool) -> Iterator[tuple[subprocess.Popen[bytes], int, Path]]:
    """Serve with the log in a file; yields the process, its port and the log."""
    module = ["tgi_trio"] if demo else ["tgi_trio.testing.fake_server", FAKE]
    with tempfile.TemporaryDirectory() as folder, reserve_port() as port:
        path = Path(folder) / "log"
        argv = [sys.executable, "-m", *module, "--port", str(port), *FLAGS]
        with path.open("wb") as log:
            process = subprocess.Popen(argv, stdout=log, stderr=log, preexec_fn=mortal())
        try:
            wait_healthy(port, process)
            yield process, port, path
        finally:
            process.kill()
            process.wait()


def run(
    faults: int,
    seed: int = 0,
    demo: bool = False,
    clients: int = 12,
    report: Report | None = None,
) -> Report:
    """Start a server, torment it, stop it, and return what was found: `report`, as it grows."""
    report, names = report or Report(), names_in_shm()
    with server(demo) as (process, port, log):
        pid = process.pid
        chaos = Chaos(pid, port, seed, clients)
        trio.run(chaos.undisturbed)
        before = vitals(pid).descriptors
        try:
            trio.run(chaos.run, faults)
        finally:
            chaos.tell(report)
        problems = chaos.story.problems
        books = at_rest(port)
        report.accepted, report.ended = int(books["tgi_request_accepted"]), ends(books)
        report.restarts = int(books["tgi_shard_restarts"])
        problems.update(unbalanced(books))
        if (after := descriptors_at_rest(pid, before)) > before:
            problems[f"{after - before} descriptors more than before"] += 1
        family = children(pid)
        process.send_signal(signal.SIGTERM)
        if (code := process.wait(120)) != 0:
            problems[f"exit code {code}"] += 1
        problems.update(f"process {each} is left" for each in still_running(family))
        problems.update(f"/dev/shm/{name} is left" for name in names_left(names))
        problems.update(defects(log))
    report.problems = dict(problems)
    return report


def defects(log: Path) -> Iterator[str]:
    """Yield the last line of every traceback in the log: none is expected."""
    inside = False
    for line in log.read_text(errors="replace").splitlines():
        if line.lstrip(" |").startswith("Traceback (most recent call last)"):
            inside = True
        elif inside and line and not line.startswith((" ", "|", "+")):
            inside = False
            yield f"in the log: {line[:200]}"


def main() -> None:
    """Parse flags, run, print, write; exit with 1 when something was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--demo", action="store_true", help="serve the embedded model")
    stats.add_output_flags(parser)
    args = parser.parse_args()
    report = Report()
    with stats.reporting(args.json, "stress.chaos", partial(summary, args, report)):
        run(args.faults, args.seed, args.demo, args.clients, report)
    sys.exit(1 if report.problems else 0)


def summary(args: argparse.Namespace, report: Report) -> tuple[str, dict[str, Any]]:
    """Return the table and what else there is to say, and what is written."""
    recovery = {name: report.recovery_s.get(name, Summary.of([])) for name in report.faults}
    rows = [
        (name, count, recovery[name].p50, recovery[name].p99)
        for name, count in sorted(report.faults.items())
    ]
    lines = [
        stats.table(("fault", "times", "recovery s, median", "p99"), rows),
        f"load: {report.finished} answers as undisturbed, {report.refused} refused (429); "
        f"{report.sent_by_faults} requests by the faults, of them {report.answers_to_faults}",
        f"books: {report.accepted} accepted = {report.ended}; {report.restarts} restarts",
        f"/live: median {report.live_ms.p50:.2f} ms, p99 {report.live_ms.p99:.2f} ms",
        *(f"PROBLEM, {times} times: {problem}" for problem, times in report.problems.items()),
        f"{len(report.problems) or 'no'} problems",
    ]
    document = {"model": "embedded" if args.demo else "none", "seed": args.seed, **asdict(report)}
    return "\n".join(lines), document


if __name__ == "__main__":
    main()
