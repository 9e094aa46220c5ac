"""Embeddings of n-grams: their hashes, texts that end within a prompt, and tables in any layout."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.shard.torch_backend.golden import assert_as_golden
from tests.shard.torch_backend.models_support import prompts
from tgi_trio.errors import ModelLoadError
from tgi_trio.model.check import check_checkpoint, model_spec
from tgi_trio.model.config import read_config
from tgi_trio.model.specs.ngrams import find_primes

Checkpoint = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("one_thread")
END = 1  # the token that ends a text in tiny checkpoints


def edit(folder: Path, to: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Copy a checkpoint, with changed tensors."""
    shutil.copytree(folder, to)
    tensors = load_file(to / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors")
    return to


def test_primes_are_counted_from_a_number_on() -> None:
    assert find_primes(20, 0, 3) == (23, 29, 31)
    assert find_primes(23, 1, 2) == (29, 31)
    assert find_primes(0, 0, 2) == (2, 3)


@pytest.mark.parametrize("order", [2, 3, 4])
def test_ngrams_do_not_reach_over_the_end_of_a_text(checkpoint: Checkpoint, order: int) -> None:
    draw = random.Random(order)
    texts = [[END if draw.random() < 0.3 else id for id in text] for text in prompts(8)[2:6]]
    size = {"ngram_size": order, "heads_per_ngram": 2 if order < 4 else 1, "ple_embed_dim": 24}
    assert_as_golden(checkpoint("qwen4_exp_text", **size), texts, 6)


def test_a_table_may_be_one_tensor(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """As transformers has it in memory; it saves the parts that the hub has."""
    place = "model.layers.{}.ple.ple_embedding."

    def join(tensors: dict[str, torch.Tensor]) -> None:
        for layer in (0, 2):
            own = place.format(layer)
            parts = [tensors.pop(f"{own}ngram_embedding.shard_{i}.weight") for i in range(3)]
            tensors[f"{own}ngram_embedding.weight"] = torch.cat(parts)
            del tensors[f"{own}layer_multipliers"]  # it follows from config.json

    folder = edit(checkpoint("qwen4_exp_text"), tmp_path / "whole", join)
    assert_as_golden(folder, prompts(8)[3:5], 4)


@pytest.mark.parametrize(
    "name", ["layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"]
)
def test_hashes_of_another_model_are_refused(
    checkpoint: Checkpoint, tmp_path: Path, name: str
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"model.layers.2.ple.ple_embedding.{name}"][-1] += 2

    config = read_config(edit(checkpoint("qwen4_exp_text"), tmp_path / "other", change))
    with pytest.raises(ModelLoadError, match=f"layers.2.*{name}.*is not what config.json gives"):
        check_checkpoint(config, model_spec(config))
