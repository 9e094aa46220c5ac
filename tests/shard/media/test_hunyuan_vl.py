"""HunyuanOCR as Tencent publishes it: tokens and logits of transformers' class for its folder."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.shard.media.hunyuan_models import turn_in_pairs
from tests.shard.media.images_support import Golden, Model, make_folder
from tests.shard.media.test_families import check
from tests.shard.torch_backend.models_support import load
from tgi_trio.model.check import check_checkpoint, model_spec
from tgi_trio.model.config import read_config
from tgi_trio.model.image_rules import image_rules
from tgi_trio.shard.media.tower import load_tower

pytestmark = pytest.mark.usefixtures("one_thread")

# What transformers' class calls tensors -> what the published file does.
PUBLISHED = (
    (r"^model\.language_model\.", "model."),
    (r"^model\.vision_tower\.", "vit."),
    (r"mlp\.fc1\.", "mlp.dense_h_to_4h."),
    (r"mlp\.fc2\.", "mlp.dense_4h_to_h."),
    (r"^(vit\.layers\.\d+)\.layer_norm1\.", r"\1.input_layernorm."),
    (r"^(vit\.layers\.\d+)\.layer_norm2\.", r"\1.post_attention_layernorm."),
    (r"patch_merger\.proj_conv\.", "perceive.proj.0."),
    (r"patch_merger\.proj_out\.", "perceive.proj.2."),
    (r"patch_merger\.", "perceive."),
)


def publish(folder: Path) -> Path:
    """Rewrite a folder of transformers' as HunyuanOCR's is: nothing nested, and other names."""
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())
    text = values.pop("text_config")
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope.pop("rope_theta")
    del rope["rope_type"]
    rope |= {"type": "xdrope", "xdrope_section": rope.pop("mrope_section")}
    flat = {**text, **values, "rope_scaling": rope}
    (folder / "config.json").write_text(json.dumps(flat))
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for ours, published in PUBLISHED:
            name = re.sub(ours, published, name)
        tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_tokens_and_logits_are_those_of_transformers(tmp_path: Path) -> None:
    folder = publish(make_folder(tmp_path, "hunyuan_vl"))
    names = load_file(folder / "model.safetensors").keys()
    assert {name.split(".")[0] for name in names} <= {"model", "vit", "lm_head"}
    config = read_config(folder)
    check_checkpoint(config, model_spec(config))
    tower = load_tower(folder, config.model_type, torch.device("cpu"), torch.float32)
    own = Model("hunyuan_vl", folder, Golden(folder), tower, image_rules(config))
    runner, recorder = load(folder)
    assert runner.info.backend != "transformers"
    check(own, runner, recorder)


def test_what_the_oracle_puts_right_is_a_rotation_and_was_none(tmp_path: Path) -> None:
    """Lengths are kept by what turns in pairs alone: see `hunyuan_models.py`."""
    from transformers.models.hunyuan_vl import modeling_hunyuan_vl as theirs

    model = Golden(make_folder(tmp_path, "hunyuan_vl")).model
    rotary = model.model.language_model.rotary_emb
    positions, heads = torch.tensor([[[9]], [[2]], [[1]], [[0]]]), torch.randn(1, 1, 1, 16)

    def length() -> float:
        cos, sin = rotary(heads[0], positions)
        return float(theirs.apply_rotary_pos_emb(heads, heads, cos, sin)[0].norm())

    assert length() == pytest.approx(float(heads.norm()), rel=1e-5)
    del rotary.recomposition_frequencies
    assert length() != pytest.approx(float(heads.norm()), rel=1e-3)
    turn_in_pairs(model)
    assert length() == pytest.approx(float(heads.norm()), rel=1e-5)
