"""DeepSeek-OCR's config.json, as it is published, and the texts of its kin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.model.support import changed, places
from tgi_trio.errors import ModelLoadError
from tgi_trio.model.config import read_config
from tgi_trio.model.deepseek_ocr import describe_class, name_as_transformers
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.image_families import find_family, has_vision

TEXT: dict[str, Any] = {
    **{"bos_token_id": 0, "eos_token_id": 1, "first_k_dense_replace": 1, "hidden_size": 1280},
    **{"intermediate_size": 6848, "kv_lora_rank": None, "max_position_embeddings": 8192},
    **{"moe_intermediate_size": 896, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2},
    **{"num_attention_heads": 10, "num_experts_per_tok": 6, "num_hidden_layers": 12},
    **{"num_key_value_heads": 10, "topk_method": "greedy", "use_mla": False, "vocab_size": 129280},
    **{"qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "v_head_dim": 0},
}
SAM = {
    **{"downsample_channels": [512, 1024], "global_attn_indexes": [2, 5, 8, 11]},
    **{"heads": 12, "layers": 12, "width": 768},
}
CLIP = {"heads": 16, "image_size": 224, "layers": 24, "patch_size": 14, "width": 1024}
FIRST: dict[str, Any] = {
    **{"model_type": "deepseek_vl_v2", "architectures": ["DeepseekOCRForCausalLM"], **TEXT},
    "language_config": {**TEXT, "architectures": ["DeepseekV2ForCausalLM"], "auto_map": {}},
    "vision_config": {
        **{"image_size": 1024, "model_name": "deeplip_b_l", "mlp_ratio": 3.7362},
        "width": {"clip-l-14-224": CLIP, "sam_vit_b": SAM},
    },
}
SECOND: dict[str, Any] = {  # which says of its text in one place alone
    **{"model_type": "deepseek_vl_v2", "architectures": ["DeepseekOCR2ForCausalLM"], **TEXT},
    "vision_config": {
        **{"image_size": 1024, "model_name": "deepencoderv2"},
        "width": {"qwen2-0-5b": {"dim": 896}, "sam_vit_b": SAM},
    },
}


def read(folder: Path, values: dict[str, Any]) -> Any:
    (folder / "config.json").write_text(json.dumps(values))
    return read_config(folder)


@pytest.mark.parametrize(
    ("values", "kind"), [(FIRST, "unlimited_ocr"), (SECOND, "deepseek_ocr2")], ids=["1", "2"]
)
def test_a_published_config_is_read_in_transformers_words(
    tmp_path: Path, values: dict[str, Any], kind: str
) -> None:
    config = read(tmp_path, values)
    assert (config.model_type, config.text_type) == (kind, "deepseek")
    assert has_vision(config.values) and find_family(config.values).layout.startswith("deepseek")
    spec = decoder_spec(config)
    assert spec is not None and spec.head_dim == 128 and config.max_positions == 8192
    first, *others = spec.layers
    assert first.experts is None and len(others) == 11
    for layer in others:
        assert layer.experts is not None and layer.experts.shared_width == 2 * 896
        assert (layer.experts.count, layer.experts.per_token) == (64, 6)


def test_towers_are_those_of_transformers_defaults() -> None:
    """Which are those of the published models."""
    from transformers import AutoConfig

    for values in (FIRST, SECOND):
        named = name_as_transformers(values)
        theirs = AutoConfig.for_model(named["model_type"]).vision_config
        ours = AutoConfig.for_model(named["model_type"], **describe_class(named)).vision_config
        assert ours.sam_config.to_dict() == theirs.sam_config.to_dict()
        if values is FIRST:
            assert ours.encoder_config.to_dict() == theirs.encoder_config.to_dict()
    second = describe_class(name_as_transformers(SECOND))["vision_config"]["encoder_config"]
    assert (second["hidden_size"], second["num_hidden_layers"]) == (896, 24)


def test_other_models_of_the_type_are_left_as_they_are() -> None:
    for named in (["DeepseekVLV2ForCausalLM"], None, "DeepseekOCRForCausalLM", [1]):
        values = {**FIRST, "architectures": named}
        assert name_as_transformers(values) == values
    assert name_as_transformers({**FIRST, "model_type": "llava"})["model_type"] == "llava"


@pytest.mark.parametrize("values", [FIRST, SECOND], ids=["1", "2"])
def test_any_value_in_any_place_is_read_or_refused(values: dict[str, Any]) -> None:
    others: list[Any] = [None, True, "x", -1, 0, 0.5, 10**8, [], ["x"], {}]
    for path in places(values["vision_config"]):
        for value in others:
            said = {**values, "vision_config": changed(values["vision_config"], path, value)}
            try:
                describe_class(name_as_transformers(said))
            except ModelLoadError as error:
                assert "config.json says" in str(error)


KIN = {
    **{"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
}


def test_windows_of_an_answer_alone_are_refused(tmp_path: Path) -> None:
    """Also where the file leaves out what layers there are, as published files do."""
    for said in ({}, {"layer_types": ["full_attention", "reference_sliding_attention"]}):
        config = read(tmp_path, {"model_type": "unlimited_ocr", "text_config": {**KIN, **said}})
        with pytest.raises(ModelLoadError, match="reference_sliding_attention, whose window is of"):
            decoder_spec(config)
    said = {"layer_types": ["full_attention"] * 2}
    config = read(tmp_path, {"model_type": "unlimited_ocr", "text_config": {**KIN, **said}})
    spec = decoder_spec(config)
    assert spec is not None and spec.layers[1].experts is not None


def test_experts_that_are_chosen_by_groups_are_not_ours(tmp_path: Path) -> None:
    for method, ours in (("greedy", True), ("group_limited_greedy", False)):
        text = {**KIN, "topk_method": method}
        config = read(tmp_path, {"model_type": "deepseek_ocr2", "text_config": text})
        assert (decoder_spec(config) is not None) == ours


@pytest.mark.parametrize("values", [FIRST, SECOND], ids=["1", "2"])
def test_what_chosen_experts_say_is_scaled(tmp_path: Path, values: dict[str, Any]) -> None:
    """By `routed_scaling_factor`, which published files leave at 1."""
    scaled = {"routed_scaling_factor": 1.5}
    values = values | scaled
    if "language_config" in values:
        values |= {"language_config": values["language_config"] | scaled}
    spec = decoder_spec(read(tmp_path, values))
    assert spec is not None and spec.layers[1].experts is not None
    experts = spec.layers[1].experts
    assert (experts.scale, experts.routing, experts.groups) == (1.5, "grouped-softmax", 1)
