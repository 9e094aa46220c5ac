"""Result files of the benchmarks; formulas and tables are those of `tgi_trio bench`."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

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


def write_json(path: Path | None, name: str, results: dict[str, Any]) -> None:
    """Write one result file (schema 1) when a path was given."""
    if path is None:
        return
    document = {"schema": 1, "bench": name, "machine": machine(), **results}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"written: {path}")
