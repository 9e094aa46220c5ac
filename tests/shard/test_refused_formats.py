"""Every backend and every rank refuses weights in a format that nobody reads, as it loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.shard.cpu_backend.kernel_support import FITTING
from tests.shard.ranks.rank_processes import ranks_of
from tests.shard.torch_backend.models_support import GreedyRecorder
from tgi_trio.errors import ModelLoadError
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.model.config import read_config
from tgi_trio.shard.backend import load_runner
from tgi_trio.shard.torch_backend.torch_loading import load_torch_runner

Make = Callable[..., Path]
Tensors = dict[str, torch.Tensor]
pytestmark = pytest.mark.usefixtures("one_thread")


def per_row(weight: torch.Tensor, largest: float) -> torch.Tensor:
    return weight.abs().amax(dim=1, keepdim=True) / largest


def fp8(name: str, weight: torch.Tensor) -> Tensors:
    scale = per_row(weight, 448.0)
    return {name: (weight / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}


def fp8_blocks(name: str, weight: torch.Tensor) -> Tensors:
    scale = (weight.abs().max() / 448.0).reshape(1, 1)
    return {name: (weight / scale).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}


def int8(name: str, weight: torch.Tensor) -> Tensors:
    scale = per_row(weight, 127.0)
    return {name: (weight / scale).round().to(torch.int8), f"{name}_scale": scale}


def bitsandbytes(name: str, weight: torch.Tensor) -> Tensors:
    absmax = weight.abs().amax(dim=1)
    stored = (weight / absmax[:, None] * 127).round().to(torch.int8)
    return {name: stored, name.replace("weight", "SCB"): absmax}


def gptq(name: str, weight: torch.Tensor) -> Tensors:
    module = name.removesuffix("weight")
    rows, columns = weight.shape
    return {
        f"{module}qweight": torch.zeros(columns // 8, rows, dtype=torch.int32),
        f"{module}qzeros": torch.zeros(1, rows // 8, dtype=torch.int32),
        f"{module}scales": torch.ones(1, rows, dtype=torch.float16),
    }


STORED = (fp8, fp8_blocks, int8, bitsandbytes, gptq)


def quantise(
    source: Path, folder: Path, store: Callable[[str, torch.Tensor], Tensors], method: str = ""
) -> Path:
    """Write a copy of a checkpoint whose layers' matrices are stored so."""
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors: Tensors = {}
    for name, weight in load_file(source / "model.safetensors").items():
        is_linear = weight.dim() == 2 and (".layers." in name or ".h." in name)
        tensors |= store(name, weight) if is_linear else {name: weight}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if method:
        path = folder / "config.json"
        config: dict[str, Any] = json.loads(path.read_text())
        config["quantization_config"] = {"quant_method": method}
        path.write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("method", ["", "tomorrow"])
@pytest.mark.parametrize("store", STORED)
@pytest.mark.parametrize("family", ["llama", "codegen"])  # ours, and one of transformers
def test_torch(
    checkpoint: Make, tmp_path: Path, family: str, store: Callable[..., Tensors], method: str
) -> None:
    folder = quantise(checkpoint(family), tmp_path, store, method)
    with pytest.raises(ModelLoadError, match="which nothing here reads") as error:
        load_torch_runner(
            ShardSettings(model_path=folder), read_config(folder), sampler=GreedyRecorder()
        )
    assert "float32, bfloat16, float16" in str(error.value)
    assert ("quantization_config" in str(error.value)) == bool(method)


@pytest.mark.parametrize("store", STORED)
def test_the_kernels(checkpoint: Make, tmp_path: Path, store: Callable[..., Tensors]) -> None:
    folder = quantise(checkpoint("llama", **FITTING["llama"]), tmp_path, store)
    with pytest.raises(ModelLoadError, match="which nothing here reads"):
        load_runner(ShardSettings(model_path=folder, cpu_backend="kernels"))


def test_every_rank(checkpoint: Make, tmp_path: Path) -> None:
    folder = quantise(checkpoint("llama"), tmp_path, fp8)
    with pytest.raises(ModelLoadError, match="which nothing here reads"):
        with ranks_of(folder, 2, GreedyRecorder()):
            pass


def test_t5(checkpoint: Make, tmp_path: Path) -> None:
    folder = quantise(checkpoint("t5"), tmp_path, fp8, "fp8")
    with pytest.raises(ModelLoadError, match="which nothing here reads"):
        load_torch_runner(
            ShardSettings(model_path=folder), read_config(folder), sampler=GreedyRecorder()
        )


@pytest.mark.parametrize("family", ["llama", "codegen", "t5"])
def test_a_tensor_that_nobody_reads(checkpoint: Make, tmp_path: Path, family: str) -> None:
    folder = quantise(checkpoint(family), tmp_path, lambda name, weight: {name: weight})
    tensors = load_file(folder / "model.safetensors")
    mask = {"transformer.h.0.attn.masked_bias": torch.tensor(-1e9)}
    save_file(tensors | mask, folder / "model.safetensors", metadata={"format": "pt"})
    load_torch_runner(
        ShardSettings(model_path=folder), read_config(folder), sampler=GreedyRecorder()
    )
    extra = {"adapter.lora_A.weight": torch.ones(2, 2)}
    save_file(tensors | extra, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"'adapter\.lora_A\.weight' .* is no part of a model"):
        load_torch_runner(
            ShardSettings(model_path=folder), read_config(folder), sampler=GreedyRecorder()
        )
