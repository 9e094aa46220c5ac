"""`python -m tgi_trio.shard.cpu_backend FOLDER`: compile a model's kernels ahead of time.

Run it before the first start, with the flags with which the model will be served.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from tgi_trio.errors import ConfigurationError, ModelLoadError, tell_reason
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.model.config import read_config
from tgi_trio.model.quantised.recognise import check_stated
from tgi_trio.settings.records import ACTIVATIONS, KV_CACHE_DTYPES, QUANTIZATIONS
from tgi_trio.shard.cpu_backend.loading import load_cpu_runner
from tgi_trio.shard.cpu_backend.machine_code.store import NO_FOLDER, choose_folder
from tgi_trio.shard.cpu_backend.unsupported import UnsupportedError
from tgi_trio.shard.machine.garbage import pause_collection


def main(argv: list[str]) -> int:
    """Load the model in `argv` once; return the exit code.

    It is 1 if the kernels cannot serve the model, or if they could not all be kept. Raises
    SystemExit (2) for unknown arguments.
    """
    parser = argparse.ArgumentParser("python -m tgi_trio.shard.cpu_backend", allow_abbrev=False)
    parser.add_argument("model_path", type=Path, metavar="FOLDER")
    parser.add_argument("--quantize", choices=QUANTIZATIONS)
    parser.add_argument("--activations", type=int, choices=ACTIVATIONS)
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES)
    settings = ShardSettings(**vars(parser.parse_args(argv)))
    lost: list[str] = []
    if choose_folder() is None:
        lost.append(NO_FOLDER)
    else:
        try:
            _compile(settings, lost.append)
        except (ConfigurationError, ModelLoadError, UnsupportedError, OSError) as error:
            why = tell_reason(error)
            lost.append(f"the CPU kernels cannot serve {settings.model_path}: {why}")
    print(*lost, sep="\n", end="\n" if lost else "", file=sys.stderr)
    return 1 if lost else 0


def _compile(settings: ShardSettings, report: Callable[[str], None]) -> None:
    """Load a model, which compiles what is missing; raises and reports as `load` does."""
    config = read_config(settings.model_path)
    if settings.quantize is not None:
        check_stated(config, settings.quantize)
    with pause_collection():
        load_cpu_runner(settings, config, report=report).close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
