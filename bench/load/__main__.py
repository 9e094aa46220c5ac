"""From a checkpoint on disk to a model that can step, against reading the file.

    python -m bench.load --shape L --json bench/out/load.json

    python -m bench.load --shape L --gguf q8_0 --cache cold

Two floors: `read`, the same bytes into one small buffer again and again, and `kept`, into memory
that nobody has used yet, which is the least a loader can do. Each load is a shard's own, in a
process of its own: `load` is the part after the imports, `ready` everything from the start of the
process; a process that imports llvmlite, or torch, and does nothing is beside it. With --server the
whole command, until /health says 200, is measured as well, and when each of its phases ended.
`processor`: seconds of processor time of all that was started, which other work on the machine
changes least. Byte code is kept and used, as on a machine where this has been started before.

Warm: the file is in the page cache. Cold: the kernel was asked to forget it (POSIX_FADV_DONTNEED);
libraries stay warm, and a cache below the file system may remember. Everything takes turns.
With --gguf the shape's weights are rounded into one file of llama.cpp's first, and that is loaded;
`check` is what the launcher does with it before it starts a shard, and `describe` what it does the
first time. With --llama llama.cpp loads the same file in a process of its own: until it has, and
until it has computed a token.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import resource
import statistics
import subprocess
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
from bench.load.in_process import load_here, load_llama_here
from bench.peers import llama_package
from bench.peers.environment import HOME
from tgi_trio.model.check import check_checkpoint, model_spec
from tgi_trio.model.config import read_config
from tgi_trio.model.gguf.folder import gguf_folder
from tgi_trio.model.scales import check_scales
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.shard.quantising.gguf_file import write_gguf

_BUFFER = 16 << 20
_TEXT = "It is 12 o'clock; 3.5 of them say so."  # that the file's tokenizer is tried on
_BACKENDS = ("kernels", "torch")
_FLOORS = ("read", "kept", "read, processor", "kept, processor")
_LOG = 1 << 20  # bytes of it that are read
_PHASES = re.compile(r"start-up: (.*)")  # in a server's log

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


def bare(module: str) -> Times:
    """Start a process that imports a library and ends."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
    return {f"import {module}": time.perf_counter() - began}


def load_llama(libraries: Path, file: Path) -> Times:
    """Load with llama.cpp in a new process; its start and its end count."""
    began = time.perf_counter()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        loaded, first = pool.submit(load_llama_here, libraries, file).result()
        total = time.perf_counter() - began
    return {"llama.cpp load": loaded, "llama.cpp load and token": first, "llama.cpp process": total}


def processor_seconds() -> float:
    """Return the processor time of this process and of all that it has waited for."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def check(folder: Path) -> Times:
    """Look at headers and scales as the launcher does before it starts a shard."""
    began = time.perf_counter()
    config = read_config(folder)
    check_scales(check_checkpoint(config, model_spec(config)))
    return {"check": time.perf_counter() - began}


def serve(folder: Path, dtype: str, backend: str) -> Times:
    """Start the whole server; what its log says of the start is counted as well."""
    flags = ["--model-id", str(folder), "--dtype", dtype, "--cpu-backend", backend]
    with tempfile.TemporaryFile() as log, running(flags, log=log) as server:
        while (phases := _PHASES.search(os.pread(log.fileno(), _LOG, 0).decode())) is None:
            time.sleep(0.01)  # it is told as the first request is answered
        named = (phase.rsplit(" ", 2) for phase in phases[1].split(", "))
        return {
            **{f"{backend} server: {name}": float(seconds) for name, seconds, _ in named},
            f"{backend} server": server.ready_s,
        }


def describe(file: Path) -> Times:
    """Write config and tokenizer of a file that has not been served before."""
    with tempfile.TemporaryDirectory() as cache:
        began = time.perf_counter()
        gguf_folder(file, Path(cache))
        return {"describe": time.perf_counter() - began}


def write_file(folder: Path, kind: str) -> Path:
    """Write the weights of a folder, rounded to `kind`, as one file beside it; once."""
    file = folder.with_name(f"{folder.name}-{kind}.gguf")
    if not file.exists():
        config = read_config(folder)
        spec = model_spec(config)
        if not isinstance(spec, DecoderSpec):
            raise ValueError(f"{folder} holds no model of the generic decoder")
        write_gguf(config, spec, file, kind.upper(), tqdm, _TEXT)
    return file


def measure(
    folder: Path,
    file: Path,
    options: argparse.Namespace,
    cold: bool,
    times: dict[str, list[float]],
) -> None:
    """Add the seconds of everything to `times`, turn by turn; `file`: what is read."""
    actions: list[Callable[[], Times]] = [partial(read, file), partial(keep, file)]
    if options.gguf:
        actions += [partial(check, folder), partial(describe, file)]
    if options.llama:
        actions.append(partial(load_llama, llama_package.find_libraries(HOME), file))
    for backend in options.backends:
        actions.append(partial(bare, "torch" if backend == "torch" else "llvmlite"))
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
            before = processor_seconds()
            found = action()
            found[f"{list(found)[-1]}, processor"] = processor_seconds() - before
            for name, seconds in found.items():
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
        if name not in _FLOORS
    ]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench.load", description=__doc__)
    parser.add_argument("--shape", choices=sorted(checkpoints.SHAPES), default="L")
    parser.add_argument("--gguf", choices=("q4_0", "q8_0"), help="a file of blocks, made of it")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--cache", choices=("warm", "cold"), nargs="+", default=["warm", "cold"])
    parser.add_argument("--backends", choices=_BACKENDS, nargs="+", default=list(_BACKENDS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--server", action="store_true", help="start the whole server, too")
    parser.add_argument("--llama", action="store_true", help="load the file with llama.cpp, too")
    parser.add_argument("--folder", type=Path, help="where the checkpoint is, or is made")
    add_output_flags(parser)
    options = parser.parse_args(argv)
    if options.llama and not options.gguf:
        parser.error("--llama: llama.cpp reads files of GGUF alone, see --gguf")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # of what is started: a second of each start
    with tempfile.TemporaryDirectory() as spare:
        folder = checkpoints.make(options.shape, options.folder or Path(spare) / options.shape)
        file = folder / "model.safetensors"
        if options.gguf:
            file = write_file(folder, options.gguf)
            folder = gguf_folder(file, Path(spare) / "gguf")
        facts = {
            "shape": options.shape,
            "dtype": options.dtype,
            "stored as": options.gguf or "numbers",
            "GB": file.stat().st_size / 1e9,
        }
        times: dict[str, dict[str, list[float]]] = {cache: {} for cache in options.cache}

        def found() -> tuple[str, dict[str, Any]]:
            rows = [row for cache, own in times.items() for row in medians_of(cache, own)]
            return table_of(rows), {**facts, "rows": rows}

        with reporting(options.json, "load", found):
            for cache, own in times.items():
                measure(folder, file, options, cache == "cold", own)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
