"""Adapters of the embedded model that change what it says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tgi_trio import demo
from tgi_trio.conversion.safetensors_file import SafetensorsFile
from tgi_trio.model.adapters.sites import adaptable_linears, find_module
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec


def write(folder: Path, seed: int, rank: int = 4, *, dora: bool = False) -> Path:
    """Write an adapter of the embedded model with random matrices; `dora`: and magnitudes.

    The latter changes the head as well.
    """
    spec = decoder_spec(read_config(demo.model_path()))
    assert spec is not None
    base = SafetensorsFile.open(demo.model_path() / "model.safetensors")
    draw, tensors = np.random.default_rng(seed), {}
    for site, linear in adaptable_linears(spec):
        if site.role == "head" and not dora:
            continue
        for piece in linear.pieces:
            matrix = piece.matrix
            name = f"base_model.model.{find_module(spec, site, matrix)}"
            if dora:
                norms = np.linalg.norm(base.floats(matrix.name), axis=1)
                magnitudes = norms * (1 + 0.1 * draw.normal(size=matrix.rows))
                tensors[f"{name}.lora_magnitude_vector"] = magnitudes.astype(np.float32)
            a = draw.normal(size=(rank, matrix.columns))
            b = draw.normal(size=(matrix.rows, rank))
            tensors[f"{name}.lora_A.weight"] = (a / matrix.columns**0.5).astype(np.float32)
            tensors[f"{name}.lora_B.weight"] = (0.2 * b / rank**0.5).astype(np.float32)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    modules = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in tensors})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    config |= {"target_modules": modules, "task_type": "CAUSAL_LM", "use_dora": dora}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def in_float32(folder: Path) -> Path:
    """Write the embedded model in float32: a sum in 16 bits would be rounded once more."""
    shutil.copytree(demo.model_path(), folder)
    tensors = SafetensorsFile.open(folder / "model.safetensors")
    whole = {name: tensors.floats(name).copy() for name in tensors.table}
    (folder / "model.safetensors").unlink()
    save_file(whole, folder / "model.safetensors")
    return folder
