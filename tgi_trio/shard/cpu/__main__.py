"""`python -m tgi_trio.shard.cpu FOLDER [--quantize eetq]`: compile what serves a model.

Before its first start, with the flags it will be served with.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tgi_trio.errors import ModelLoadError
from tgi_trio.shard.cpu.fitting import UnfitError
from tgi_trio.shard.cpu.load import load
from tgi_trio.shard.model_config import compute_dtype, read_config
from tgi_trio.shard.models.families import decoder_spec


def main(argv: list[str]) -> int:
    """Load the model in `argv[0]` once; return the exit code, 1 where the kernels cannot."""
    int8 = argv[1:] == ["--quantize", "eetq"]
    if not (len(argv) == 1 or int8):
        print("usage: python -m tgi_trio.shard.cpu FOLDER [--quantize eetq]", file=sys.stderr)
        return 2
    try:
        config = read_config(Path(argv[0]))
        dtype = compute_dtype(None, config, on_cpu=True)
        load(config, decoder_spec(config), dtype=dtype, int8=int8).close()
    except (ModelLoadError, UnfitError) as error:
        print(f"the CPU kernels cannot serve {argv[0]}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
