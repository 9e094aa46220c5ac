"""Bad input in bulk: 20,000 hostile requests against a server whose shard has no model.

    python -m tests.stress.fuzz

Broken JSON, huge numbers, deep nesting, wrong encodings, 100 MB bodies, header floods, pipelining,
half requests and more (`fuzz_attacks.py`). Afterwards the server must be as it was: no answer
with a 5xx status, no request without its answer, every descriptor, KV block and permit back, and
memory that stopped growing. Exits with 1 when one of these does not hold.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import trio
from tqdm import tqdm

from bench.harness import stats
from bench.harness.server import Server, running
from tests.stress.fuzz_client import Findings, open_files, run

PERMITS = 64
FLAGS = ("--max-total-tokens", "64", "--max-concurrent-requests", str(PERMITS))
GROWTH = 16.0  # MiB that the router may grow after its first quarter
SETTLE = 120.0  # seconds given to the server to be as it was


@dataclass
class State:
    """What a server holds."""

    files: int  # descriptors
    free_blocks: int  # of the KV cache, those of the prefix cache included
    open_requests: int  # accepted and not ended
    rss: float  # MiB


def state(server: Server) -> State:
    """Return what the server holds now."""
    files = open_files(server.pid)  # first: the connection of what follows is none of them
    url = f"http://{server.host}:{server.port}/metrics"
    text = urllib.request.urlopen(url, timeout=30).read().decode()

    def metric(name: str) -> int:
        found = re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
        return int(sum(map(float, found)))

    ended = sum(metric(f"tgi_request_{end}") for end in ("finished", "failed", "cancelled"))
    status = Path(f"/proc/{server.pid}/status").read_text()
    rss = int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024
    return State(
        files=files,
        free_blocks=metric("tgi_kv_blocks_free") + metric("tgi_prefix_cache_blocks"),
        open_requests=metric("tgi_request_accepted") - ended,
        rss=rss,
    )


def settled(server: Server, before: State) -> State:
    """Return the state once it is what it was before, or when patience ends."""
    deadline = time.monotonic() + SETTLE
    while True:
        time.sleep(0.2)  # until what asked before is closed
        now = state(server)
        same = now.files <= before.files and now.free_blocks == before.free_blocks
        if (same and now.open_requests == 0) or time.monotonic() > deadline:
            return now


def free_permits(server: Server) -> bool:
    """Return whether as many generations as there are permits are let in at once."""
    body = {"inputs": "x", "parameters": {"best_of": PERMITS, "do_sample": True}}
    request = urllib.request.Request(
        f"http://{server.host}:{server.port}/generate",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            return int(response.status) == 200
    except urllib.error.HTTPError:
        return False


def problems(
    findings: Findings, before: State, after: State, early: State, free: bool
) -> list[str]:
    """Return what must not be."""
    found = list(findings.violations)
    if after.files > before.files:  # some of a start may have been open before
        found.append(f"{after.files} descriptors, {before.files} before")
    if after.free_blocks != before.free_blocks:
        found.append(f"{after.free_blocks} KV blocks are free, {before.free_blocks} before")
    if after.open_requests:
        found.append(f"{after.open_requests} accepted requests never ended")
    if after.rss - early.rss > GROWTH:
        found.append(f"the router grew by {after.rss - early.rss:.1f} MiB after its first quarter")
    if not free:
        found.append("not every permit came back")
    return found


class Siege:
    """One run, and what is known of it so far."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed
        self.findings = Findings()
        self.states: list[State] = []  # before, after a quarter, at the end
        self.problems: list[str] = []
        self.seconds = 0.0

    def attack(self, server: Server, parallel: int) -> None:
        """Carry out all attacks, then see what is left of the server."""
        connect = partial(trio.open_tcp_stream, server.host, server.port)
        self.states.append(settled(server, state(server)))
        with tqdm(total=self.count, desc="attacks") as progress:

            def done() -> None:
                progress.update()
                if progress.n == self.count // 4:
                    self.states.append(state(server))

            start = time.monotonic()
            trio.run(run, connect, self.count, self.seed, parallel, done, self.findings)
            self.seconds = time.monotonic() - start
        before, early = self.states
        after = settled(server, before)
        self.states.append(after)
        self.problems += problems(self.findings, before, after, early, free_permits(server))

    def summary(self) -> tuple[str, dict[str, Any]]:
        """Return the tables, and what is written."""
        findings, rss = self.findings, [each.rss for each in self.states]
        lines = [
            stats.table(("attack", "times"), sorted(findings.kinds.items())),
            stats.table(("outcome", "times"), sorted(findings.answers.items())),
        ]
        if len(rss) == 3:
            lines.append(
                f"{self.count} attacks in {self.seconds:.0f} s; memory {rss[0]:.0f} MiB before, "
                f"{rss[1]:.0f} after a quarter, {rss[2]:.0f} at the end ({rss[2] - rss[1]:+.1f})"
            )
            lines += self.problems or ["nothing was violated and nothing leaked"]
        results = {
            "kinds": dict(findings.kinds),
            "outcomes": dict(findings.answers),
            "seconds": self.seconds,
            "rss_mib": rss,
            "problems": self.problems or findings.violations,
        }
        return "\n".join(lines), {"count": self.count, "seed": self.seed, "results": results}


def main() -> int:
    """Parse flags, attack, print, write; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parallel", type=int, default=16)
    stats.add_output_flags(parser)
    args = parser.parse_args()
    siege = Siege(args.count, args.seed)
    with (
        stats.reporting(args.json, "stress.fuzz", siege.summary),
        running([*FLAGS, "--max-best-of", str(PERMITS)], fake="{}") as server,
    ):
        siege.attack(server, args.parallel)
    return 1 if siege.problems else 0


if __name__ == "__main__":
    sys.exit(main())
