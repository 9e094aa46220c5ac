"""From a checkpoint on disk to a model that can step, against reading the file.

    python -m bench.load --shape L --json bench/out/load.json

`read` is the floor: the same bytes, read into one buffer again and again. `load` is
`TorchRunner.load`, mapping, joining and packing included, in this process (importing torch is not
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
from pathlib import Path
from typing import Any

from bench import checkpoints
from bench.stats import add_output_flags, table, write_json
from tgi_trio.shard.model_runner import TorchRunner

_BUFFER = 16 << 20


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


def measure(folder: Path, dtype: str, runs: int, cold: bool) -> dict[str, Any]:
    """Return medians over `runs` turns of reading and loading."""
    file = folder / "model.safetensors"
    times: dict[str, list[float]] = {"read": [], "load": []}
    actions: dict[str, Callable[[], object]] = {
        "read": lambda: read(file),
        "load": lambda: TorchRunner.load(folder, dtype=dtype),
    }
    for run in range(runs + 1):  # one to warm up
        for name, action in actions.items():
            if cold:
                forget(file)
            taken = seconds(action)
            if run:
                times[name].append(taken)
        print(f"{'cold' if cold else 'warm'} {run}/{runs}", file=sys.stderr, flush=True)
    load, floor = (statistics.median(times[name]) for name in ("load", "read"))
    return {
        "cache": "cold" if cold else "warm",
        "dtype": dtype,
        "GB": file.stat().st_size / 1e9,
        "read_s": floor,
        "load_s": load,
        "load / read": load / floor,
    }


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
        rows = [measure(folder, options.dtype, options.runs, cold) for cold in (False, True)]
    print(table(list(rows[0]), [list(row.values()) for row in rows]))
    write_json(options.json, "load", {"shape": options.shape, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
