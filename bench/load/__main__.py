"""From a checkpoint on disk to a model that can step, against reading the file.

    python -m bench.load --shape L --json bench/out/load.json

Two floors: `read`, the same bytes into one small buffer again and again, and `kept`, into memory
that nobody has used yet, which is the least a loader can do. Each load is a shard's own, in a
process of its own: `load` is the part after the imports, `ready` everything from the start of the
process. With --server the whole command, until /health says 200, is measured as well.

Warm: the file is in the page cache. Cold: the kernel was asked to forget it (POSIX_FADV_DONTNEED);
libraries stay warm, and a cache below the file system may remember. Everything takes turns.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from bench.harness import checkpoints
from bench.harness.server import running
from bench.harness.stats import add_output_flags, reporting, table_of
from bench.load.in_process import load_here

_BUFFER = 16 << 20
_BACKENDS = ("numba", "torch")

Times = dict[str, float]


def read(file: Path) -> Times:
    """Read a file from its beginning to its end."""
    buffer = bytearray(_BUFFER)
    began = time.perf_counter()
    with file.open("rb", buffering=0) as source:
        while source.readinto(buffer):
            pass
    return {"read": time.perf_counter() - began}


def keep(file: Path) -> Times:
    """Read a file into new memory."""
    began = time.perf_counter()
    buffer = memoryview(np.empty(file.stat().st_size, np.uint8).data)
    with file.open("rb", buffering=0) as source:
        place = 0
        while count := source.readinto(buffer[place : place + _BUFFER]):
            place += count
    return {"kept": time.perf_counter() - began}


def forget(file: Path) -> None:
    """Ask the kernel to drop the file from its page cache."""
    with file.open("rb") as source:
        os.fsync(source.fileno())
        os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def load(folder: Path, dtype: str, backend: str) -> Times:
    """Load in a new process; its start and its end are counted as well in `ready`."""
    began = time.perf_counter()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        loaded = pool.submit(load_here, folder, dtype, backend).result()
        ready = time.perf_counter() - began
    return {f"{backend} load": loaded, f"{backend} ready": ready}


def serve(folder: Path, dtype: str, backend: str) -> Times:
    """Start the whole server."""
    flags = ["--model-id", str(folder), "--dtype", dtype, "--cpu-backend", backend]
    with running(flags) as server:
        return {f"{backend} server": server.ready_s}


def measure(
    folder: Path,
    options: argparse.Namespace,
    cold: bool,
    times: dict[str, list[float]],
) -> None:
    """Add the seconds of everything to `times`, turn by turn."""
    file = folder / "model.safetensors"
    actions: list[Callable[[], Times]] = [partial(read, file), partial(keep, file)]
    for backend in options.backends:
        actions.append(partial(load, folder, options.dtype, backend))
        if options.server:
            actions.append(partial(serve, folder, options.dtype, backend))
    if not cold:
        read(file)
    for turn in tqdm(range(options.runs), desc="cold" if cold else "warm"):
        # What comes before warms memory on a host that takes free memory away: each goes first.
        first = turn % len(actions)
        for action in actions[first:] + actions[:first]:
            if cold:
                forget(file)
            for name, seconds in action().items():
                times.setdefault(name, []).append(seconds)


def medians_of(cache: str, times: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return medians over the turns of everything, a row for each that is no floor."""
    medians = {name: statistics.median(values) for name, values in times.items()}

    def ratio(name: str, floor: str) -> float:
        pairs = zip(times[name], times[floor], strict=False)  # the last turn may be half a one
        return statistics.median(seconds / least for seconds, least in pairs)

    return [
        {
            "cache": cache,
            "what": name,
            "s": median,
            "read s": medians["read"],
            "kept s": medians["kept"],
            "/ read": ratio(name, "read"),
            "/ kept": ratio(name, "kept"),
        }
        for name, median in medians.items()
        if name not in ("read", "kept")
    ]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench.load", description=__doc__)
    parser.add_argument("--shape", choices=sorted(checkpoints.SHAPES), default="L")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--cache", choices=("warm", "cold"), nargs="+", default=["warm", "cold"])
    parser.add_argument("--backends", choices=_BACKENDS, nargs="+", default=list(_BACKENDS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--server", action="store_true", help="start the whole server, too")
    parser.add_argument("--folder", type=Path, help="where the checkpoint is, or is made")
    add_output_flags(parser)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as spare:
        folder = checkpoints.make(options.shape, options.folder or Path(spare) / options.shape)
        size = (folder / "model.safetensors").stat().st_size
        facts = {"shape": options.shape, "dtype": options.dtype, "GB": size / 1e9}
        times: dict[str, dict[str, list[float]]] = {cache: {} for cache in options.cache}

        def found() -> tuple[str, dict[str, Any]]:
            rows = [row for cache, own in times.items() for row in medians_of(cache, own)]
            return table_of(rows), {**facts, "rows": rows}

        with reporting(options.json, "load", found):
            for cache, own in times.items():
                measure(folder, options, cache == "cold", own)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
