"""Folders of pickles, made on the spot."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

Tensors = Mapping[str, torch.Tensor]


def write_folder(folder: Path, tensors: Tensors, *, legacy: bool = False, **config: Any) -> Path:
    """Write a model of one pickle."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    save(dict(tensors), folder / "pytorch_model.bin", legacy)
    return folder


def save(value: Any, path: Path, legacy: bool = False) -> None:
    torch.save(value, path, _use_new_zipfile_serialization=not legacy)


def write_parts(folder: Path, parts: Mapping[str, Tensors], **config: Any) -> Path:
    """Write a model of several pickles (file -> tensors) with their index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    for file, tensors in parts.items():
        save(dict(tensors), folder / file)
    weight_map = {name: file for file, tensors in parts.items() for name in tensors}
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return folder


def assert_equal(found: Tensors, wanted: Tensors) -> None:
    """The same names, dtypes, shapes and bits."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(found[name]) == bits(tensor), name


def bits(tensor: torch.Tensor) -> list[int]:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)  # its stride is 1, whatever torch thinks
    return flat.copy_(tensor.detach().reshape(-1)).view(torch.uint8).tolist()


def converted(folder: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of the folder's safetensors."""
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}
