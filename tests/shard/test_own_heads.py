"""Heads that config.json ties to the embedding and that a checkpoint has: transformers decides."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model.support import Asked
from tests.shard.cpu_backend.kernel_support import cpu_runner
from tests.shard.torch_backend.golden import Golden, assert_greedy
from tests.shard.torch_backend.models_support import load, prompts, run, sequences
from tests.support.quantised import quantise, store_gptq
from tgi_trio.model.check import check_model
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.shard.torch_backend.models.decoder import Decoder
from tgi_trio.shard.torch_backend.torch_runner import TorchRunner

Make = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("one_thread")
NEW = 8
TABLES = {"llama": "model.embed_tokens.weight", "gpt2": "transformer.wte.weight"}


def store_head(source: Path, folder: Path, head: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """Return a copy of a checkpoint with a head that is made of its embedding."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    table = next(tensor for name, tensor in tensors.items() if name in TABLES.values())
    tensors["lm_head.weight"] = head(table).contiguous().clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def check_tokens(folder: Path, golden: Golden, backend: str, tolerance: float = 5e-4) -> None:
    rows = sequences(prompts(2), new=NEW)
    loaded = nullcontext(load(folder)) if backend == "torch" else cpu_runner(folder)
    with loaded as (runner, recorder):
        run(runner, rows)
        for row in rows:
            assert_greedy(golden, recorder, row, tolerance=tolerance)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("backend", ["torch", "kernels"])
def test_a_head_of_other_values_is_not_tied(
    checkpoint: Make, tmp_path: Path, family: str, backend: str
) -> None:
    sizes: dict[str, Any] = {"n_embd": 128} if family == "gpt2" else {"head_dim": 32}
    source = checkpoint(family, tie_word_embeddings=True, **sizes)
    folder = store_head(source, tmp_path / "other", lambda table: table.roll(3, 0))
    (warning,) = check_model(read_config(folder), Asked())
    assert "tie_word_embeddings" in warning and "other values" in warning
    golden, prompt = Golden(folder), prompts(1)[0]
    assert golden.greedy(prompt, NEW)[0] != Golden(source).greedy(prompt, NEW)[0]
    check_tokens(folder, golden, backend)


def test_a_head_of_the_same_values_is_tied(checkpoint: Make, tmp_path: Path) -> None:
    source = checkpoint("llama", tie_word_embeddings=True)
    folder = store_head(source, tmp_path / "same", lambda table: table)
    assert check_model(read_config(folder), Asked()) == []
    runner, _ = load(folder)
    assert isinstance(runner, TorchRunner) and isinstance(runner.model, Decoder)
    assert runner.model.head.weight.data_ptr() == runner.model.embedding.data_ptr()
    # The same file with one other number, as large and in the same place.
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    spec = decoder_spec(read_config(folder))
    assert spec is not None and not spec.tied_head


@pytest.mark.parametrize("backend", ["torch", "kernels"])
def test_a_quantised_head_beside_a_plain_embedding(
    checkpoint: Make, tmp_path: Path, backend: str
) -> None:
    source = checkpoint("llama", tie_word_embeddings=True, head_dim=32)
    whole = store_head(source, tmp_path / "whole", lambda table: table.roll(3, 0))
    said = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
    endings = ("_proj.weight", "lm_head.weight")
    folder = quantise(whole, tmp_path / "q", store_gptq(4, 32), said, endings=endings)
    check_model(read_config(folder), Asked())
    check_tokens(folder, Golden(folder / "plain"), backend, tolerance=5e-3)
