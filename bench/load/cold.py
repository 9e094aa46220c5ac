"""The first start of a shard on a CPU, which compiles its kernels: by format of the weights.

    python -m bench.load.cold --json bench/out/cold.json
    python -m bench.load.cold --models some-Q4_K_M.gguf folder-of-gptq

Each start is a process of its own that loads the model as a shard does, self-tests included: `cold`
with nothing kept, then `kept`, with what that one has left. `processor` counts all that was
started, and hardly changes with what else the machine does. `kernels`: how many were compiled. The
embedded model is loaded as it is stored, with adapters beside it, and in forms that `--quantize`
makes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench.harness.stats import add_output_flags, reporting, table_of
from tgi_trio.demo import model_path
from tgi_trio.model.gguf.folder import gguf_folder

_FORMS: dict[str, dict[str, Any]] = {
    "embedded": {},
    "embedded, adapters": {"max_lora_rank": 64},
    "embedded, eetq": {"quantize": "eetq"},
    "embedded, q4_0": {"quantize": "q4_0"},
}
_PROGRAM = """
import json, sys
from pathlib import Path
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.model.config import read_config
from tgi_trio.shard.machine.garbage import pause_collection
from tgi_trio.shard.cpu_backend.loading import load_cpu_runner
folder = Path(sys.argv[1])
with pause_collection():
    settings = ShardSettings(model_path=folder, **json.loads(sys.argv[2]))
    load_cpu_runner(settings, read_config(folder)).close()
"""


def start(folder: Path, settings: Mapping[str, Any], store: Path) -> tuple[float, float]:
    """Load in a new process that keeps kernels in `store`; return seconds, and processor seconds.

    Raises CalledProcessError where the kernels do not serve the model.
    """
    environment = {**os.environ, "KERNEL_CACHE_DIR": str(store)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", _PROGRAM, str(folder), json.dumps(settings)]
    subprocess.run(command, check=True, env=environment, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - began, processor


def count_kernels(store: Path) -> Counter[str]:
    """Return how many forms of each kernel are in a store, without what fills panels."""
    versions = (store / "tgi-trio-kernels").glob("*/*-*.o")
    names = (path.name.partition("-")[0] for path in versions)
    return Counter(name.rpartition(".")[2] for name in names if not name.startswith("fillers."))


def measure(name: str, folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Start twice; return a row of the table."""
    with tempfile.TemporaryDirectory() as kept:
        cold = start(folder, settings, Path(kept))
        found = count_kernels(Path(kept))
        again = start(folder, settings, Path(kept))
    return {
        "what": name,
        "cold, s": cold[0],
        "cold, processor": cold[1],
        "kept, s": again[0],
        "kept, processor": again[1],
        "kernels": found.total(),
        "of them": ", ".join(f"{count} {each}" for each, count in sorted(found.items())),
    }


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench.load.cold", description=__doc__)
    parser.add_argument("--forms", nargs="*", choices=_FORMS, default=list(_FORMS))
    parser.add_argument("--models", nargs="*", type=Path, default=[], help="folders, GGUF files")
    add_output_flags(parser)
    options = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory() as spare,
        reporting(options.json, "load.cold", lambda: (table_of(rows), {"rows": rows})),
    ):
        models = [(name, model_path(), _FORMS[name]) for name in options.forms]
        for path in options.models:
            folder = path if path.is_dir() else gguf_folder(path.resolve(), Path(spare))
            models.append((path.name, folder, {}))
        for name, folder, settings in tqdm(models):
            rows.append(measure(name, folder, settings))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
