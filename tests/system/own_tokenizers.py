"""Adapters of the embedded model with tokenizers and chat templates of their own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file
from transformers import AutoTokenizer

from tests.system.adapter_support import in_float32, write

SPARE = 18  # rows of the embedding that no token of the model's has
MARKS = ("<|im_start|>", "<|im_end|>")
QUESTIONS = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_ROWS = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"


def base_with_spare_rows(folder: Path) -> Path:
    """Write the embedded model with rows that its tokenizer has no tokens for."""
    in_float32(folder)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    name = "model.embed_tokens.weight"
    more = np.random.default_rng(1).normal(size=(SPARE, tensors[name].shape[1]))
    tensors[name] = np.concatenate((tensors[name], 0.01 * more.astype(np.float32)))
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors")
    config["vocab_size"] += SPARE
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_templated(folder: Path, base: Path, seed: int) -> Path:
    """Write an adapter that has another chat template, and else the model's tokenizer."""
    write(folder, seed)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = QUESTIONS
    tokenizer.save_pretrained(folder)
    return folder


def write_ended(folder: Path, base: Path, seed: int, eos: str = ".") -> Path:
    """Write an adapter whose answers end with a token that is an ordinary one of the model's."""
    write(folder, seed)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.eos_token = eos
    tokenizer.save_pretrained(folder)
    return folder


def write_marked(folder: Path, base: Path, seed: int, scale: float = 1.0) -> Path:
    """Write an adapter that was taught ChatML's marks in spare rows; `scale`: of these."""
    write(folder, seed)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    tokenizer.eos_token = MARKS[1]
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    ids = [int(tokenizer.get_vocab()[mark]) for mark in MARKS]
    embedding = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    draw = np.random.default_rng(seed)
    rows = draw.normal(size=(len(ids), embedding.shape[1])) * embedding[:2000].std() * scale
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors[_ROWS] = rows.astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    _edit(folder / "adapter_config.json", trainable_token_indices={"embed_tokens": ids})
    return folder


def write_generation_ends(folder: Path, plain: Path, ends: list[int]) -> Path:
    """Write an adapter that has nothing of its own but `eos_token_id` of a generation config."""
    shutil.copytree(plain, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


def _edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
