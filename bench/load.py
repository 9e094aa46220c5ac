"""From a checkpoint on disk to a model that can step, against reading the file.

    python -m bench.load --shape L --json bench/out/load.json

`read` is the floor: the same bytes, read into one buffer again and again. Loading is `load_runner`
with each CPU backend, mapping and packing included, in this process (imports and compiling are not
counted; `bench.startup` does). Warm: the file is in the page cache. Cold: the kernel was asked to
forget it (POSIX_FADV_DONTNEED), which it may ignore where the file system has a cache below.
Reading and loading alternate.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench import checkpoints
from bench.stats import add_output_flags, table, write_json
from tgi_trio.shard.backend import load_runner

_BUFFER = 16 << 20
_BACKENDS = ("numba", "torch")


def read(file: Path) -> None:
    """Read a file from its beginning to its end."""
    buffer = bytearray(_BUFFER)
    with file.open("rb", buffering=0) as source:
        while source.readinto(buffer):
            pass


def forget(file: Path) -> None:
    """Ask the kernel to drop the file from its page cache."""
    with file.open("rb") as source:
        os.fsync(source.fileno())
        os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds(action: Callable[[], object]) -> float:
    """Return how long `action` takes; what it returns is let go after the clock is read."""
    began = time.perf_counter()
    result = action()
    taken = time.perf_counter() - began
    del result
    gc.collect()
    return taken


def measure(folder: Path, dtype: str, runs: int, cold: bool) -> list[dict[str, Any]]:
    """Return medians over `runs` turns of reading and loading, a row per backend."""
    file = folder / "model.safetensors"
    actions: dict[str, Callable[[], object]] = {"read": lambda: read(file)}
    for backend in _BACKENDS:
        actions[backend] = partial(load_runner, folder, dtype=dtype, cpu_backend=backend)
    times: dict[str, list[float]] = {name: [] for name in actions}
    for run in range(runs + 1):  # one to warm up
        for name, action in actions.items():
            if cold:
                forget(file)
            taken = seconds(action)
            if run:
                times[name].append(taken)
        print(f"{'cold' if cold else 'warm'} {run}/{runs}", file=sys.stderr, flush=True)
    floor = statistics.median(times["read"])
    return [
        {
            "cache": "cold" if cold else "warm",
            "backend": backend,
            "dtype": dtype,
            "GB": file.stat().st_size / 1e9,
            "read_s": floor,
            "load_s": statistics.median(times[backend]),
            "load / read": statistics.median(
                load / read for load, read in zip(times[backend], times["read"], strict=True)
            ),
        }
        for backend in _BACKENDS
    ]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench.load", description=__doc__)
    parser.add_argument("--shape", choices=sorted(checkpoints.SHAPES), default="L")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the checkpoint is, or is made")
    add_output_flags(parser)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as spare:
        folder = checkpoints.make(options.shape, options.folder or Path(spare) / options.shape)
        rows = [
            row
            for cold in (False, True)
            for row in measure(folder, options.dtype, options.runs, cold)
        ]
    print(table(list(rows[0]), [list(row.values()) for row in rows]))
    write_json(options.json, "load", {"shape": options.shape, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
