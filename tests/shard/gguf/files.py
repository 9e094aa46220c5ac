"""GGUF files that tests write, and what their models say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.shard.torch_backend.models_support import (
    GreedyRecorder,
    load,
    prompts,
    run,
    sequence,
    tables,
)
from tgi_trio.model.gguf.folder import gguf_folder
from tgi_trio.shard.contract import ShardSequence

gguf: Any = pytest.importorskip("gguf", reason="gguf is not installed")

NEW = 8


def write(
    file: Path,
    name: str,
    said: dict[str, Any],
    arrays: dict[str, np.ndarray],
    kind: str = "Q8_0",
) -> None:
    """Write a file by llama.cpp's own writer; arrays of bytes are blocks of `kind`."""
    writer = gguf.GGUFWriter(file, name)
    for key, value in said.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for tensor, array in arrays.items():
        if array.dtype == np.uint8:
            writer.add_tensor(tensor, array, raw_dtype=gguf.GGMLQuantizationType[kind])
        elif array.dtype == np.int32:
            writer.add_tensor(tensor, array)
        else:
            writer.add_tensor(tensor, np.ascontiguousarray(array, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def answers(file: Path, tmp_path: Path) -> tuple[list[ShardSequence], GreedyRecorder]:
    """Return what a file's model says to a few prompts, and with which logits."""
    runner, recorder = load(gguf_folder(file, tmp_path / "cache", tokenizer=False), dtype="float32")
    some = prompts(6)[1::2]  # enough for what weights mean: how rows mix is tried elsewhere
    blocks = tables(some, shuffle=1, new=NEW)
    rows = [sequence(i, prompt, blocks[i], new=NEW) for i, prompt in enumerate(some)]
    run(runner, rows, chunk=20, joins=2)
    return rows, recorder
