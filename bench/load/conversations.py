"""The first token of conversations' next turns, when not all of them fit into the KV cache.

    python -m bench.load.conversations --shape S --tokens 2048 --json bench/out/conversations.json

Conversations take turns, so that each finds its blocks evicted when it goes on. Three servers are
asked the same: one without `--prefix-cache-host-bytes`, one with it, and as the floor one whose KV
cache holds all conversations. torch computes on the CPU: there the copies are real, but only a
device says what it costs to copy over its bus (`bench.device.host_copies`).
"""

from __future__ import annotations

import argparse
import json
import time
import urllib.request
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

from tqdm import tqdm

from bench.harness import stats
from bench.harness.checkpoints import SHAPES, make
from bench.harness.server import Server, running
from bench.harness.stats import Summary

_TURN: Final = 32  # tokens that a turn adds
_BLOCK: Final = 16
_VOCAB: Final = 1000  # ids that prompts have


def first_token(server: Server, conversation: int, tokens: int) -> tuple[float, int]:
    """Return the seconds to the first token behind a prompt, and how many of it were cached."""
    ids = [(7 * i + 131 * conversation) % _VOCAB for i in range(tokens)]
    request = urllib.request.Request(
        f"http://{server.host}:{server.port}/v1/completions",
        json.dumps({"model": "tgi", "prompt": ids, "max_tokens": 1}).encode(),
        {"content-type": "application/json"},
    )
    began = time.monotonic()
    with urllib.request.urlopen(request, timeout=600) as response:
        response.read()
        cached = int(response.headers["x-cached-tokens"])
    return time.monotonic() - began, cached


def metric(server: Server, name: str) -> float:
    """Return one series of a server."""
    with urllib.request.urlopen(f"http://{server.host}:{server.port}/metrics") as response:
        lines = response.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.split()[0] == name)


def converse(
    flags: list[str], conversations: int, tokens: int, turns: int, bar: tqdm[Any]
) -> tuple[list[float], int, float]:
    """Return the seconds to the first token of all turns but the first, the tokens of their prompts
    that were cached, and how many blocks came back from the host's memory.
    """
    times, cached = [], 0
    with running(flags) as server:
        for turn in range(turns):
            for conversation in range(conversations):
                took, found = first_token(server, conversation, tokens + turn * _TURN)
                bar.update()
                if turn:
                    times.append(took)
                    cached += found
        return times, cached, metric(server, "tgi_prefix_cache_copied_back_blocks")


def summary(rows: dict[str, tuple[list[float], int, float]]) -> tuple[str, dict[str, Any]]:
    """Return the table of what was measured so far, and the distributions."""
    found = {name: Summary.of(times) for name, (times, _, _) in rows.items() if times}
    floor = min((s.p50 for s in found.values()), default=0.0)
    table = stats.table(
        (
            "KV cache",
            "turns",
            "median s",
            "max s",
            "times the least",
            "cached tokens",
            "copied back",
        ),
        [
            (name, s.n, s.p50, max(rows[name][0]), s.p50 / floor, *rows[name][1:])
            for name, s in found.items()
        ],
    )
    return table, {"results": {name: asdict(summary) for name, summary in found.items()}}


def main() -> None:
    """Parse flags, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="S")
    parser.add_argument(
        "--tokens", type=int, default=2048, help="of each conversation's first turn"
    )
    parser.add_argument("--conversations", type=int, default=4)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--checkpoints", type=Path, default=Path("/tmp"))
    stats.add_output_flags(parser)
    args = parser.parse_args()
    longest = args.tokens + args.turns * _TURN + _BLOCK
    flags = ["--model-id", str(make(args.shape, args.checkpoints / f"tgi-trio-{args.shape}"))]
    flags += ["--cpu-backend", "torch", "--max-total-tokens", str(longest)]
    few, all_of_them = longest + 4 * _BLOCK, args.conversations * (longest + 4 * _BLOCK)
    servers = {
        "of one conversation": ["--max-batch-total-tokens", str(few)],
        "and the host's memory": [
            *("--max-batch-total-tokens", str(few)),
            *("--prefix-cache-host-bytes", str(1 << 30)),
        ],
        "of all conversations": ["--max-batch-total-tokens", str(all_of_them)],
    }
    rows: dict[str, tuple[list[float], int, float]] = {}
    asked = len(servers) * args.conversations * args.turns
    with (
        stats.reporting(args.json, "load.conversations", partial(summary, rows)),
        tqdm(total=asked, desc="turns") as bar,
    ):
        for name, memory in servers.items():
            rows[name] = converse(
                [*flags, *memory], args.conversations, args.tokens, args.turns, bar
            )


if __name__ == "__main__":
    main()
