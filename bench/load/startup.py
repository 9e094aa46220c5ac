"""From the command to the first token, in seconds, over several starts.

    python -m bench.load.startup --runs 5 --json bench/out/startup.json

The first `--cold` starts find no compiled kernels. Floors beside it, in the same run: an
interpreter that only imports torch, and `transformers` generating one token from the same folder
(AutoModel + AutoTokenizer).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import asdict
from functools import partial
from typing import Any

from tqdm import tqdm

from bench.harness import stats
from bench.harness.server import running
from bench.harness.stats import Summary

FLOORS = {"torch": "import torch", "transformers": "transformers, one token"}
CODE = {
    "torch": "import torch",
    "transformers": """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
inputs = tokenizer("Hello", return_tensors="pt")
model.generate(**inputs, max_new_tokens=1, do_sample=False)
""",
}


def first_token(flags: list[str], cache: str | None = None) -> tuple[float, float]:
    """Start a server; return (seconds to ready, seconds to the first token).

    `cache`: where compiled kernels are kept; None: where they always are.
    """
    start = time.monotonic()
    with running(flags, environment={} if cache is None else {"KERNEL_CACHE_DIR": cache}) as server:
        body = json.dumps({"inputs": "Hello", "parameters": {"max_new_tokens": 1}}).encode()
        request = urllib.request.Request(
            f"http://{server.host}:{server.port}/generate",
            body,
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as response:
            response.read()
        return server.ready_s, time.monotonic() - start


def timed(argv: list[str]) -> float:
    """Return the seconds a command takes."""
    start = time.monotonic()
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.monotonic() - start


def summary(rows: dict[str, list[float]]) -> tuple[str, dict[str, Any]]:
    """Return the table of what was started so far, and the distributions."""
    found = {name: Summary.of(values) for name, values in rows.items() if values}
    table = stats.table(
        ("what", "n", "median s", "min s", "max s"),
        [(name, s.n, s.p50, min(rows[name]), max(rows[name])) for name, s in found.items()],
    )
    return table, {"results": {name: asdict(summary) for name, summary in found.items()}}


def main() -> None:
    """Parse flags, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--cold", type=int, default=1, help="starts without compiled kernels")
    parser.add_argument("--floors", nargs="*", choices=FLOORS, default=list(FLOORS))
    parser.add_argument("--model-id", help="served model; the embedded one by default")
    stats.add_output_flags(parser)
    args = parser.parse_args()
    from tgi_trio.hub.resolve import resolve_model

    folder = str(resolve_model(args.model_id, None))
    flags = ["--model-id", args.model_id] if args.model_id else []
    rows: dict[str, list[float]] = {
        "server first token, kernels compiled": [],
        "server ready": [],
        "server first token": [],
        **{FLOORS[name]: [] for name in args.floors},
    }
    with stats.reporting(args.json, "load.startup", partial(summary, rows)):
        for _ in tqdm(range(args.cold), desc="cold starts"):
            with tempfile.TemporaryDirectory() as cache:
                rows["server first token, kernels compiled"].append(first_token(flags, cache)[1])
        for _ in tqdm(range(args.runs), desc="starts"):
            ready, token = first_token(flags)
            rows["server ready"].append(ready)
            rows["server first token"].append(token)
            for name in args.floors:
                rows[FLOORS[name]].append(timed([sys.executable, "-c", CODE[name], folder]))


if __name__ == "__main__":
    main()
