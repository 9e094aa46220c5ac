"""A projector as small as one can be, beside the embedded model: for tests of what finds it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.gguf_files import float32, gguf, llama_metadata, write_llama
from tgi_trio import demo

HIDDEN, WIDTH = 8, 16  # of the tower
IMAGE = "<image>"  # in whose places features stand


def write_seeing_llama(file: Path) -> Path:
    """Write the embedded model with a token for images, as SmolVLM's vocabulary has it."""
    tokens = llama_metadata(demo.model_path())["tokenizer.ggml.tokens"]
    return write_llama(demo.model_path(), file, {"tokenizer.ggml.tokens": [*tokens[:-1], IMAGE]})


def write_tiny_projector(file: Path, changes: Mapping[str, Any] | None = None) -> Path:
    """Write SmolVLM's projector for the embedded model. Returns the file.

    `changes`: of the metadata; None takes a key out.
    """
    features = llama_metadata(demo.model_path())["llama.embedding_length"]
    said = {
        "general.architecture": "clip",
        "clip.has_vision_encoder": True,
        "clip.projector_type": "idefics3",
        "clip.use_gelu": True,
        "clip.vision.image_size": 16,
        "clip.vision.patch_size": 8,
        "clip.vision.embedding_length": HIDDEN,
        "clip.vision.feed_forward_length": WIDTH,
        "clip.vision.block_count": 1,
        "clip.vision.attention.head_count": 2,
        "clip.vision.image_mean": [0.5, 0.5, 0.5],
        "clip.vision.image_std": [0.5, 0.5, 0.5],
    } | dict(changes or {})
    tensors = {
        "v.patch_embd.weight": np.ones((HIDDEN, 3, 8, 8)),
        "v.blk.0.ffn_up.weight": np.ones((WIDTH, HIDDEN)),
        "v.blk.0.ffn_down.weight": np.ones((HIDDEN, WIDTH)),
        "mm.model.fc.weight": np.ones((features, 4 * HIDDEN)),
    }
    kept = {name: value for name, value in said.items() if value is not None}
    file.write_bytes(gguf(kept, {name: float32(array) for name, array in tensors.items()}))
    return file
