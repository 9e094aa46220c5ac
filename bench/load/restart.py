"""The first answer to a long prompt after a restart, with the prefixes that were kept and without.

    python -m bench.load.restart --shape S --tokens 4096 --json bench/out/restart.json

Each turn starts a server three times: without `--prefix-cache-path`; with an empty folder; and with
what that server has kept. Floors beside it, in the same run: reading the kept files, and writing
as much (to the disk, `fsync` included).
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
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

_AT_ONCE: Final = 1 << 24  # bytes


def first_token(server: Server, tokens: int) -> float:
    """Return the seconds to the first token behind a prompt of so many."""
    prompt = " ".join(f"{7 * i % 1000}" for i in range(tokens // 2))
    words = {"inputs": prompt, "parameters": {"max_new_tokens": 1, "truncate": tokens}}
    request = urllib.request.Request(
        f"http://{server.host}:{server.port}/generate",
        json.dumps(words).encode(),
        {"content-type": "application/json"},
    )
    began = time.monotonic()
    with urllib.request.urlopen(request, timeout=600) as response:
        response.read()
    return time.monotonic() - began


def serve(flags: list[str], tokens: int) -> tuple[float, float, float]:
    """Run a server for one request; return the seconds to ready, to the first token, of its end."""
    with running(flags) as server:
        ready, token = server.ready_s, first_token(server, tokens)
        began = time.monotonic()
    return ready, token, time.monotonic() - began


def copy_times(folder: Path) -> tuple[int, float, float]:
    """Return the bytes of the files in a folder, and the seconds to read and to write as much."""
    began, size = time.monotonic(), 0
    parts = []
    for path in folder.glob("*.prefixes"):
        with path.open("rb", buffering=0) as file:
            while part := file.read(_AT_ONCE):
                parts.append(part)
                size += len(part)
    read, began = time.monotonic() - began, time.monotonic()
    with (folder / "written").open("wb", buffering=0) as file:
        for part in parts:
            file.write(part)
        os.fsync(file.fileno())
    written = time.monotonic() - began
    (folder / "written").unlink()
    return size, read, written


def summary(rows: dict[str, list[float]]) -> tuple[str, dict[str, Any]]:
    """Return the table of what was measured so far, and the distributions."""
    found = {name: Summary.of(values) for name, values in rows.items() if values}
    table = stats.table(
        ("what", "n", "median s", "min s", "max s"),
        [(name, s.n, s.p50, min(rows[name]), max(rows[name])) for name, s in found.items()],
    )
    return table, {"results": {name: asdict(summary) for name, summary in found.items()}}


def main() -> None:
    """Parse flags, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="S")
    parser.add_argument("--tokens", type=int, default=4096, help="of the prompt")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--checkpoints", type=Path, default=Path("/tmp"))
    stats.add_output_flags(parser)
    args = parser.parse_args()
    flags = ["--model-id", str(make(args.shape, args.checkpoints / f"tgi-trio-{args.shape}"))]
    flags += ["--max-total-tokens", str(args.tokens + 64)]
    rows: dict[str, list[float]] = {}

    def note(name: str, values: tuple[float, float, float]) -> None:
        for what, value in zip(("ready", "first token", "end"), values, strict=True):
            rows.setdefault(f"{name}: {what}", []).append(value)

    with stats.reporting(args.json, "load.restart", partial(summary, rows)):
        for _ in tqdm(range(args.turns), desc="restarts"):
            with tempfile.TemporaryDirectory(dir=args.checkpoints) as folder:
                keeping = [*flags, "--prefix-cache-path", folder]
                note("nothing is kept", serve(flags, args.tokens))
                note("an empty folder", serve(keeping, args.tokens))
                size, read, written = copy_times(Path(folder))
                note("what was kept", serve(keeping, args.tokens))
            rows.setdefault("reading the files alone", []).append(read)
            rows.setdefault("writing as much", []).append(written)
            tqdm.write(f"{size / 1e6:.0f} MB are kept")


if __name__ == "__main__":
    main()
