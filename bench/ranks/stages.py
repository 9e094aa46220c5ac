"""Tokens a second of a model on two ranks, against one process with the same cores.

    python -m bench.ranks.stages --shape S --json bench/out/stages.json

Both are whole servers of the same backend with two threads between them, asked in turns.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

from bench.harness.checkpoints import SHAPES, make
from bench.harness.server import Server, running
from bench.harness.stats import add_output_flags, reporting, table_of

PATIENCE = 300.0  # seconds that an answer may take
ALONE = ("--cpu-threads", "2")
RANKS = ("--num-shard", "2", "--cpu-threads", "1")
WAYS = {"stages": ("--pipeline-stages", "2"), "parts": ()}  # of the layers, or of each of them


def ask(server: Server, number: int, tokens: int) -> None:
    """Wait for one answer of so many tokens."""
    body = {
        "model": "served",
        "prompt": f"Request {number}",
        "max_tokens": tokens,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        f"http://{server.host}:{server.port}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        response.read()


def rate(server: Server, sequences: int, tokens: int) -> float:
    """Return the tokens a second of so many sequences at a time."""
    began = time.perf_counter()
    with ThreadPoolExecutor(sequences) as clients:
        list(clients.map(lambda number: ask(server, number, tokens), range(sequences)))
    return sequences * tokens / (time.perf_counter() - began)


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--way", choices=sorted(WAYS), default="stages", help="of dividing it")
    parser.add_argument("--backend", choices=("kernels", "torch"), default="kernels")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--turns", type=int, default=7)
    add_output_flags(parser)
    options = parser.parse_args()
    found: list[dict[str, Any]] = []

    def report() -> tuple[str, dict[str, Any]]:
        told = {name: getattr(options, name) for name in ("shape", "way", "backend", "dtype")}
        return table_of(found), {"rows": found} | told

    with reporting(options.json, "ranks.stages", report), tempfile.TemporaryDirectory() as folder:
        model = make(options.shape, Path(folder) / "model")
        flags = (
            *("--model-id", str(model), "--served-model-name", "served"),
            *("--dtype", options.dtype, "--cpu-backend", options.backend),
        )
        with running((*flags, *ALONE)) as one, running((*flags, *RANKS, *WAYS[options.way])) as two:
            for sequences in options.sequences:
                found.append(measure(one, two, sequences, options.tokens, options.turns))


def measure(one: Server, two: Server, sequences: int, tokens: int, turns: int) -> dict[str, Any]:
    """Return medians, and that of the ratios of turns."""
    for server in (one, two):  # what is computed for the first time takes longer
        rate(server, sequences, min(tokens, 8))
    pairs = [
        (rate(one, sequences, tokens), rate(two, sequences, tokens))
        for _ in tqdm(range(turns), desc=f"{sequences} sequences", leave=False)
    ]
    return {
        "sequences": sequences,
        "one process tokens/s": round(median(alone for alone, _ in pairs), 1),
        "two ranks tokens/s": round(median(staged for _, staged in pairs), 1),
        "ratio p50": round(median(staged / alone for alone, staged in pairs), 2),
        "ratio least": round(min(staged / alone for alone, staged in pairs), 2),
    }


if __name__ == "__main__":
    main()
