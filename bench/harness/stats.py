"""What benchmarks print and write; formulas and tables are those of `tgi_trio bench`."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.harness.processor import describe_processor
from tgi_trio.client.measures import RequestRecord as RequestRecord
from tgi_trio.client.measures import Summary as Summary
from tgi_trio.client.measures import summarise as summarise
from tgi_trio.client.measures import table as table


def machine() -> dict[str, Any]:
    """Return what a reader must know about where a number was measured."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "processor": describe_processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "load_1m": round(os.getloadavg()[0], 2),
        "commit": commit,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flag every benchmark has."""
    parser.add_argument("--json", type=Path, help="also write the results to this file")


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table of rows with the same keys, which are its header."""
    if not rows:
        return "nothing was measured"
    return table(list(rows[0]), [list(row.values()) for row in rows])


@contextmanager
def reporting(
    path: Path | None, name: str, found: Callable[[], tuple[str, dict[str, Any]]]
) -> Iterator[None]:
    """Print and write what `found` returns, a text and the results, when the block is left.

    By an error or Ctrl-C as well: what has been measured by then is not lost. `found` must make do
    with what is there. The error then goes on, and the file names it as `failed`. Without `path`
    nothing is written.
    """
    try:
        yield
    except BaseException as error:
        failed = f"{type(error).__name__}: {error}"
        try:
            _report(path, name, found, {"failed": failed})
        except Exception as other:  # too little is there: the error that matters is the first
            print(f"nothing can be shown of what was measured: {other!r}", file=sys.stderr)
        raise
    _report(path, name, found, {})


def _report(
    path: Path | None,
    name: str,
    found: Callable[[], tuple[str, dict[str, Any]]],
    more: dict[str, Any],
) -> None:
    text, results = found()
    print(text)
    for what, value in more.items():
        print(f"{what}: {value}")
    if path is None:
        return
    document = {"schema": 1, "bench": name, "machine": machine(), **results, **more}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"written: {path}")
