"""A tiny model of ones as a GGUF file, with changes to what it says and holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.gguf_files import float32, gguf

Changes = dict[str, Any]

TINY: Changes = {
    "general.architecture": "llama",
    "llama.context_length": 64,
    "llama.embedding_length": 8,
    "llama.block_count": 1,
    "llama.feed_forward_length": 16,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["<s>", "</s>", "a", "b", "ab"],
    "tokenizer.ggml.token_type": [3, 3, 1, 1, 1],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
}
SHAPES = {
    "token_embd.weight": (5, 8),
    "output_norm.weight": (8,),
    "blk.0.attn_norm.weight": (8,),
    "blk.0.ffn_norm.weight": (8,),
    "blk.0.attn_q.weight": (8, 8),
    "blk.0.attn_k.weight": (4, 8),
    "blk.0.attn_v.weight": (4, 8),
    "blk.0.attn_output.weight": (8, 8),
    "blk.0.ffn_gate.weight": (16, 8),
    "blk.0.ffn_up.weight": (16, 8),
    "blk.0.ffn_down.weight": (8, 16),
}


def tiny(folder: Path, changes: Changes | None = None, more: Changes | None = None) -> Path:
    """Write a file of ones; `changes` of metadata and `more` tensors, None takes one out."""
    metadata = {k: v for k, v in (TINY | (changes or {})).items() if v is not None}
    shapes = {k: v for k, v in (SHAPES | (more or {})).items() if v is not None}
    file = folder / "tiny.gguf"
    tensors = {name: float32(np.ones(shape)) for name, shape in shapes.items()}
    file.write_bytes(gguf(metadata, tensors))
    return file


def read(folder: Path, name: str) -> dict[str, Any]:
    return dict(json.loads((folder / name).read_text()))
