"""What auto-round makes of a random model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.model.support import Asked
from tests.shard.made_by_tools.support import open_model
from tgi_trio.model.check import check_model
from tgi_trio.model.config import read_config
from tgi_trio.shard.checkpoint.lookup import open_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

MIXED = {"layers.0.mlp.down_proj": {"bits": 8}, "layers.1.self_attn.q_proj": {"bits": 16}}


def quantise_by_auto_round(source: Path, made: Path, form: str, **scheme: Any) -> Path:
    """Write a checkpoint, and return its folder, of which nothing is refused."""
    library = pytest.importorskip("auto_round")
    rounder = library.AutoRound(
        str(source), iters=0, group_size=32, device_map="cpu", disable_opt_rtn=True, **scheme
    )
    rounder.quantize_and_save(str(made), format=form)
    (folder,) = (path.parent for path in made.rglob("config.json"))
    assert json.loads((folder / "config.json").read_text())["quantization_config"]
    assert check_model(read_config(folder), Asked()) == []
    return folder


@pytest.mark.parametrize("symmetric", [True, False])
def test_auto_round_in_its_own_form(source: Path, tmp_path: Path, symmetric: bool) -> None:
    """With modules that differ: products by its library, which has them in float16."""
    layers = {f"model.{name}": scheme for name, scheme in MIXED.items()}
    scheme: dict[str, Any] = {"bits": 4, "sym": symmetric, "layer_config": layers}
    folder = quantise_by_auto_round(source, tmp_path / "made", "auto_round", **scheme)
    model = open_model(folder, dtype=torch.float32, device_map="cpu")
    products = 0
    with open_checkpoint(read_config(folder)) as weights, torch.inference_mode():
        for name, module in model.named_modules():
            if hasattr(module, "qweight"):
                expected = module(torch.eye(module.infeatures)).float().T
                found = weights.matrix(f"{name}.weight", tuple(expected.shape)).dequantised()
                torch.testing.assert_close(
                    torch.from_numpy(found.copy()), expected, rtol=2**-9, atol=1e-6
                )
                products += 1
    assert products == 13


@pytest.mark.parametrize(
    ("form", "scheme"),
    [
        ("auto_gptq", {"bits": 4}),
        ("auto_gptq", {"bits": 8}),
        ("auto_round:auto_awq", {"bits": 4, "sym": False}),
    ],
)
def test_auto_round(source: Path, tmp_path: Path, form: str, scheme: dict[str, Any]) -> None:
    """Nothing of it dequantises on its own: its files are read as near to the original."""
    folder = quantise_by_auto_round(source, tmp_path / "made", form, **scheme)
    original = load_file(source / "model.safetensors")
    with open_checkpoint(read_config(folder)) as weights:
        for name, weight in original.items():
            if name.endswith("_proj.weight"):
                rows, columns = weight.shape
                found = weights.matrix(name, (rows, columns)).dequantised()
                error = (torch.from_numpy(found.copy()) - weight).norm() / weight.norm()
                assert error < 0.02 if scheme["bits"] == 8 else error < 0.15
