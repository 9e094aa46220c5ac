"""What a model leaves unread of its checkpoint: harmless by name, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.model.support import LLAMA, Asked, Stored, make_folder, write_json
from tgi_trio.errors import ModelLoadError
from tgi_trio.model.check import check_model, check_unread
from tgi_trio.model.config import read_config

F32 = ("F32", (2, 2))
Shapes = dict[str, tuple[str, tuple[int, ...]]]  # name -> dtype, shape

GPT = {"vocab_size": 8, "n_embd": 4, "n_layer": 1, "n_head": 2, "n_positions": 16}
PHI4 = LLAMA | {"model_type": "phi4_multimodal"}
NEOX = LLAMA | {"model_type": "gpt_neox"}
DEEPSEEK = LLAMA | {
    "model_type": "deepseek_v3",
    "num_nextn_predict_layers": 1,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
MTP = "model.layers.1."  # behind the only layer


def check(folder: Path) -> list[str]:
    return check_model(read_config(folder), Asked())


# (config, tensor, what it is): as real checkpoints of these types have them.
HARMLESS: list[tuple[dict[str, Any], str, Stored]] = [
    (LLAMA, "model.layers.0.self_attn.rotary_emb.inv_freq", F32),
    (LLAMA, "model.layers.0.self_attn.rotary_emb.cos_cached", F32),
    (LLAMA | {"tie_word_embeddings": True}, "lm_head.weight", ("F32", (8, 4))),
    (LLAMA, "v_head.summary.weight", F32),
    (GPT | {"model_type": "gpt2"}, "transformer.h.0.attn.bias", ("BOOL", (1, 1, 16, 16))),
    (GPT | {"model_type": "gpt2"}, "transformer.h.0.attn.masked_bias", ("F32", ())),
    (GPT | {"model_type": "gptj"}, "transformer.h.0.attn.bias", ("U8", (1, 1, 16, 16))),
    (NEOX, "gpt_neox.layers.0.attention.bias", ("BOOL", (1, 1, 16, 16))),
    (NEOX, "gpt_neox.layers.0.attention.masked_bias", ("F32", ())),
    (NEOX, "gpt_neox.layers.0.attention.rotary_emb.inv_freq", F32),
    (LLAMA, "model.embeddings.position_ids", ("I64", (1, 16))),
    (DEEPSEEK, f"{MTP}eh_proj.weight", F32),
    (DEEPSEEK, f"{MTP}shared_head.head.weight", F32),
    (DEEPSEEK, f"{MTP}mlp.experts.0.gate_proj.weight", F32),
    (PHI4, "model.layers.0.mlp.up_proj.lora_A.speech.weight", F32),
    (PHI4, "model.layers.0.mlp.up_proj.lora_B.vision.weight", F32),
    (LLAMA, "mtp.layers.0.mlp.up_proj.weight", F32),
    (LLAMA, "model.mtp_block.0.mlp.up_proj.weight", F32),  # ERNIE 4.5
]


@pytest.mark.parametrize(("config", "name", "stored"), HARMLESS, ids=lambda v: str(v)[-40:])
def test_what_real_checkpoints_carry_is_let_be(
    tmp_path: Path, config: dict[str, Any], name: str, stored: Stored
) -> None:
    assert check(make_folder(tmp_path, config, {name: stored})) == []


def test_names_without_the_base_prefix(tmp_path: Path) -> None:
    """GPT-2 as it lies on the hub: saved from the bare model, with its masks."""
    from tests.model.support import claimed, write_safetensors

    write_json(tmp_path, GPT | {"model_type": "gpt2"})
    bare = {n.removeprefix("transformer."): stored for n, stored in claimed(tmp_path).items()}
    mask = {"h.0.attn.bias": ("F32", (1, 1, 16, 16))}
    write_safetensors(tmp_path / "model.safetensors", bare | mask)
    assert check(tmp_path) == []
    write_safetensors(tmp_path / "model.safetensors", bare | {"h.0.attn.extra": F32})
    with pytest.raises(ModelLoadError, match=r"'h\.0\.attn\.extra'"):
        check(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",  # attention_bias is not set
        "model.layers.0.self_attn.q_norm.weight",  # of another family
        "model.layers.1.mlp.up_proj.weight",  # behind num_hidden_layers, and no such layers stated
        "vision_tower.patch_embedding.weight",
        "adapter.lora_A.weight",
        "medusa_head.0.0.linear.weight",  # config.json states none
    ],
)
def test_what_nobody_reads_is_refused_by_name(tmp_path: Path, name: str) -> None:
    make_folder(tmp_path, LLAMA, {name: F32})
    with pytest.raises(ModelLoadError, match=f"'{name}' .* no part of a model of type 'llama'"):
        check(tmp_path)


def test_the_first_of_many_is_named_and_the_others_counted(tmp_path: Path) -> None:
    make_folder(tmp_path, LLAMA, {"b.weight": F32, "a.weight": F32, "c.weight": F32})
    with pytest.raises(ModelLoadError, match=r"'a\.weight' .* as are 2 others"):
        check(tmp_path)


def test_more_layers_that_draft_than_are_stated_are_refused(tmp_path: Path) -> None:
    make_folder(tmp_path, DEEPSEEK, {"model.layers.2.eh_proj.weight": F32})
    with pytest.raises(ModelLoadError, match=r"model\.layers\.2\.eh_proj"):
        check(tmp_path)


@pytest.mark.parametrize(
    ("name", "served"),
    [
        ("vision_tower.encoder.weight", True),
        ("model.visual.blocks.0.weight", True),
        ("multi_modal_projector.linear_1.weight", True),
        ("model.language_model.layers.0.extra.weight", False),
        ("model.layers.0.q_proj.weight_scale", False),
    ],
)
def test_what_transformers_leaves_unread(tmp_path: Path, name: str, served: bool) -> None:
    """Of a model of several senses the part that writes text may be served alone."""
    config = read_config(make_folder(tmp_path, LLAMA, {name: F32}))
    if served:
        check_unread(config, [name])
        return
    with pytest.raises(ModelLoadError, match=name):
        check_unread(config, [name])
