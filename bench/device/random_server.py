"""The whole server on a shard of a real shape with random weights: everything else is real.

    python -m bench.device.random_server '{"shape": "8B"}' --model-id FOLDER --port 3000

The first argument is for `random_shard.py`, the rest are the server's flags. FOLDER has the shape's
configuration and a tokenizer, which `write_folder` writes, and names of weights that nobody reads.
"""

from __future__ import annotations

import json
import math
import os
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.device.models import values_of
from bench.harness.checkpoints import tensor_sizes
from tgi_trio.__main__ import serve
from tgi_trio.cli.parser import parse
from tgi_trio.testing.checkpoints import make_tokenizer

_STOP_S: Final = 60.0  # until a shard is killed that was told to end: it has figures to write


def write_folder(shape: str, folder: Path) -> Path:
    """Write what a server reads of a model of `shape` besides its weights; return `folder`."""
    values = values_of(shape)
    make_tokenizer(folder, values["vocab_size"])
    write_names(tensor_sizes(values), folder / "model.safetensors")
    settings = folder / "tokenizer_config.json"
    told = json.loads(settings.read_text()) | {
        "model_max_length": values["max_position_embeddings"]
    }
    settings.write_text(json.dumps(told))
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(values | ids))
    return folder


def write_names(sizes: dict[str, tuple[int, ...]], path: Path) -> None:
    """Write a safetensors file of bfloat16 tensors whose numbers are a hole in the file: it takes
    no room, and a server finds in it that all are there.
    """
    header, at = {}, 0
    for name, size in sizes.items():
        end = at + 2 * math.prod(size)
        header[name] = {"dtype": "BF16", "shape": size, "data_offsets": (at, end)}
        at = end
    told = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(told)) + told)
        file.truncate(file.tell() + at)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve; raises what the server raises."""
    options, *flags = sys.argv[1:] if argv is None else argv

    def random_shard(spec: str, settings: str) -> list[str]:
        return [sys.executable, "-m", "bench.device.random_shard", spec, options, settings]

    return serve(parse(flags, os.environ), random_shard, _STOP_S)


if __name__ == "__main__":
    sys.exit(main())
