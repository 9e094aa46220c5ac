"""What mlx-lm makes of random models."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.model.support import Asked
from tests.shard.made_by_tools.support import Make, check
from tests.shard.torch_backend.models_support import (
    load,
    prompts,
    run,
    sequences,
)
from tgi_trio.model.check import check_model
from tgi_trio.model.config import read_config

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def utils() -> Any:
    """mlx-lm's; its import would lower how many files this process and its children may open, and
    would leave a variable that hushes transformers in all tests behind it.
    """
    with mock.patch("resource.setrlimit"), mock.patch.dict(os.environ):
        return pytest.importorskip("mlx_lm.utils")


def load_mlx(utils: Any, source: Path) -> Any:
    """Return mlx-lm's model of a checkpoint, and its config; newer names are not known to it."""
    said = json.loads((source / "config.json").read_text())
    turning = said.get("rope_parameters", {})
    names = ("rope_theta", "partial_rotary_factor")
    older = {name: turning[name] for name in names if name in turning}
    older["num_experts"] = said.get("num_experts", said.get("num_local_experts", 0))
    return utils.load_model(source, model_config=older)


MODES = ("affine:2:32", "affine:3:64", "affine:5:64", "affine:8:32", "mxfp4:4:32", "mxfp8:8:32")


@pytest.mark.parametrize("packed", [*MODES, "nvfp4:4:16"])
def test_mlx(utils: Any, source: Path, tmp_path: Path, packed: str) -> None:
    """With embedding and head, and a module that differs."""
    core = pytest.importorskip("mlx.core")
    mode, bits, group = packed.split(":")

    def choose(path: str, module: Any) -> Any:
        differs = path.endswith("layers.1.self_attn.q_proj")
        return {"group_size": 64, "bits": 6, "mode": "affine"} if differs else path != "lm_head"

    model, config = load_mlx(utils, source)
    quantised = utils.quantize_model(
        model, config, int(group), int(bits), mode, quant_predicate=choose
    )
    made = tmp_path / "made"
    utils.save_model(made, quantised[0])
    utils.save_config(quantised[1], made / "config.json")
    exact: dict[str, torch.Tensor] = {}
    for name, module in quantised[0].named_modules():
        if hasattr(module, "scales"):
            biases = getattr(module, "biases", None)
            weight = core.dequantize(
                module.weight, module.scales, biases, module.group_size, module.bits, module.mode
            )
            exact[f"{name}.weight"] = torch.tensor(weight.astype(core.float32).tolist())
    assert len(exact) == 15
    check(made, exact, source, tmp_path)


# Families whose checkpoints mlx-lm changes.
CHANGED = (
    *("deepseek_v3", "glm4_moe_lite", "laguna", "lfm2_moe", "mistral4", "mixtral", "nemotron_h"),
    *("qwen3_moe", "qwen3_next"),
)
LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32, "q_lora_rank": 32}


@pytest.mark.parametrize("family", CHANGED)
def test_families_of_mlx(utils: Any, checkpoint: Make, tmp_path: Path, family: str) -> None:
    """In 4 bits: tokens and logits are mlx-lm's own."""
    core = pytest.importorskip("mlx.core")
    sizes: dict[str, Any] = {"hidden_size": 128}
    if family in ("deepseek_v3", "glm4_moe_lite", "mistral4"):
        sizes |= LATENT
    model, config = load_mlx(utils, checkpoint(family, **sizes))
    model, config = utils.quantize_model(model, config, 32, 4)
    made = tmp_path / "made"
    utils.save_model(made, model)
    utils.save_config(config, made / "config.json")
    assert check_model(read_config(made), Asked()) == []
    runner, recorder = load(made, dtype="float32")
    rows = sequences(prompts(3), new=8)
    run(runner, rows)
    for row, prompt in zip(rows, prompts(3), strict=True):
        ids = list(prompt)
        for own in recorder.logits(row.id):
            logits = torch.tensor(model(core.array([ids]))[0, -1].astype(core.float32).tolist())
            torch.testing.assert_close(own, logits, rtol=0, atol=1e-3)
            ids.append(int(logits.argmax()))
