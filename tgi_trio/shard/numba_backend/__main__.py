"""`python -m tgi_trio.shard.numba_backend FOLDER [--quantize eetq]`: compile what serves a model.

Before its first start, with the flags it will be served with.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tgi_trio.errors import ModelLoadError
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.model.config import read_config
from tgi_trio.shard.machine.garbage import pause_collection
from tgi_trio.shard.numba_backend.loading import load
from tgi_trio.shard.numba_backend.unsupported import UnsupportedError


def main(argv: list[str]) -> int:
    """Load the model in `argv[0]` once; return the exit code, 1 where the kernels cannot."""
    int8 = argv[1:] == ["--quantize", "eetq"]
    if not (len(argv) == 1 or int8):
        print(
            "usage: python -m tgi_trio.shard.numba_backend FOLDER [--quantize eetq]",
            file=sys.stderr,
        )
        return 2
    try:
        settings = ShardSettings(model_path=Path(argv[0]), quantize="eetq" if int8 else None)
        with pause_collection():
            load(settings, read_config(settings.model_path)).close()
    except (ModelLoadError, UnsupportedError) as error:
        print(f"the CPU kernels cannot serve {argv[0]}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
