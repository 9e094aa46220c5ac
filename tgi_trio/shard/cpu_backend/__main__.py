"""`python -m tgi_trio.shard.cpu_backend FOLDER`: compile a model's kernels ahead of time.

Run it before the first start, with the flags with which the model will be served.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tgi_trio.errors import ModelLoadError
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.model.config import read_config
from tgi_trio.settings.records import ACTIVATIONS, KV_CACHE_DTYPES, QUANTIZATIONS
from tgi_trio.shard.cpu_backend.loading import load
from tgi_trio.shard.cpu_backend.unsupported import UnsupportedError
from tgi_trio.shard.machine.garbage import pause_collection


def main(argv: list[str]) -> int:
    """Load the model in `argv` once; return the exit code, 1 if the kernels cannot serve it.

    Raises SystemExit (2) for unknown arguments.
    """
    parser = argparse.ArgumentParser("python -m tgi_trio.shard.cpu_backend", allow_abbrev=False)
    parser.add_argument("model_path", type=Path, metavar="FOLDER")
    parser.add_argument("--quantize", choices=QUANTIZATIONS)
    parser.add_argument("--activations", type=int, choices=ACTIVATIONS)
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES)
    settings = ShardSettings(**vars(parser.parse_args(argv)))
    try:
        with pause_collection():
            load(settings, read_config(settings.model_path)).close()
    except (ModelLoadError, UnsupportedError, OSError) as error:
        print(f"the CPU kernels cannot serve {settings.model_path}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
