"""Matrices that adapters save whole, compared with the model's before a shard is there."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.adapters.files import WEIGHTS, read_adapter
from tgi_trio.model.adapters.sites import map_adapter
from tgi_trio.model.adapters.trained_whole import check_saved
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec

DATA = Path(__file__).parents[2] / "conversion" / "data"  # what PEFT and transformers wrote


@pytest.mark.parametrize("base_dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16", "F64"])
def test_matrices_that_were_trained_whole_are_found_at_the_start(
    tmp_path: Path, base_dtype: str, dtype: str
) -> None:
    """And those that differ in few rows are not refused, whatever both are rounded to."""
    kinds = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    kinds["F64"] = torch.float64
    base = Path(shutil.copytree(DATA / "llama" / "base", tmp_path / "base"))
    adapter = Path(shutil.copytree(DATA / "llama" / "adapter", tmp_path / "adapter"))
    written = adapter / "adapter_config.json"
    both = {"modules_to_save": ["lm_head", "embed_tokens"]}
    written.write_text(json.dumps(json.loads(written.read_text()) | both))
    tensors = load_file(base / "model.safetensors")
    tensors = {name: each.to(kinds[base_dtype]) for name, each in tensors.items()}
    save_file(tensors, base / "model.safetensors")
    config = read_config(base)
    spec = decoder_spec(config)
    assert spec is not None
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        saved = tensors[name].to(kinds[dtype]).clone()
        saved[[2, 9]] += 0.5
        for trained, refused in ((saved, False), (saved[:20], False), (saved + 0.25, True)):
            file = {f"base_model.model.{name}": trained.contiguous()}
            save_file(file, adapter / WEIGHTS)
            read = read_adapter(adapter)
            changes = map_adapter(read, spec, 2)
            told = pytest.raises(ModelLoadError, match=r"in more than 2 rows.*--max-lora-rank")
            with told if refused else nullcontext():
                check_saved(read, changes, config, spec, 2)
