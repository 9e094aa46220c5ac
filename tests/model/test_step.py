"""The config.json of Step 3.7, as it is published and as transformers writes it, says the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.model.support import write_json
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.specs.decoder import DecoderSpec, LayerSpec, RotarySpec

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "head_dim": 16,
}
# Lists go on with a layer that drafts.
PUBLISHED: dict[str, Any] = SIZES | {
    "num_attention_groups": 2,
    "moe_num_experts": 6,
    "moe_top_k": 3,
    "share_expert_dims": 40,
    "num_nextn_predict_layers": 1,
    "moe_layers_enum": "2, 3,4",
    "layer_types": ["full_attention", "sliding_attention"] * 3,
    "sliding_window": 24,
    "attention_other_setting": {"num_attention_heads": 8},
    "rope_theta": [5e6, 1e4] * 3,
    "partial_rotary_factors": [0.5, 1.0] * 3,
    "rope_scaling": {
        **{"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 64},
        **{"low_freq_factor": 1.0, "high_freq_factor": 32.0},
    },
    "swiglu_limits": [0.0, 0.0, 0.0, 0.0, 7.0, 0.0],
    "swiglu_limits_shared": [0.0, 0.0, 0.0, 16.0, 16.0, 0.0],
}


def spec_of(folder: Path, text: dict[str, Any]) -> DecoderSpec | None:
    write_json(folder, {"model_type": "step3p7", "text_config": text})
    spec = decoder_spec(read_config(folder))
    if spec is None:
        return None
    layers, drafting = (tuple(map(with_bare_rotary, own)) for own in (spec.layers, spec.mtp))
    return replace(spec, layers=layers, mtp=drafting)


def with_bare_rotary(layer: LayerSpec) -> LayerSpec:
    """Return a layer without what its rotary embedding does not read."""
    rotary_spec = layer.rotary
    if rotary_spec is not None and rotary_spec.kind == "default":
        rotary_spec = RotarySpec(rotary_spec.dim, rotary_spec.theta)
    elif rotary_spec is not None:
        kept = {name: rotary_spec.parameters[name] for name in PUBLISHED["rope_scaling"]}
        rotary_spec = replace(rotary_spec, parameters=kept)
    return replace(layer, rotary=rotary_spec)


@pytest.mark.parametrize("said", [{}, SIZES, PUBLISHED], ids=["nothing", "sizes", "published"])
def test_it_is_read_as_transformers_reads_it(tmp_path: Path, said: dict[str, Any]) -> None:
    from transformers import AutoConfig

    theirs = AutoConfig.for_model("step3p7", text_config=dict(said)).to_dict()["text_config"]
    ours = spec_of(tmp_path / "bare", said)
    assert ours is not None and ours == spec_of(tmp_path / "whole", theirs)
    if said is PUBLISHED:
        assert [ours.sizes(layer).heads for layer in ours.layers] == [4, 8, 4, 8, 4]
        assert [layer.rotary and layer.rotary.dim for layer in ours.layers] == [8, 16, 8, 16, 8]
        last = ours.layers[-1].experts
        assert last is not None and (last.limit, last.shared_limit) == (7.0, 16.0)
        (drafting,) = ours.mtp
        assert drafting.window == 24 and drafting.experts is None
        assert ours.sizes(drafting).heads == 8


@pytest.mark.parametrize(
    ("other", "count"),
    [
        ({}, 1),
        ({"layer_types": None}, 1),
        ({"layer_types": PUBLISHED["layer_types"][:5]}, 0),
        ({"mlp_layer_types": ["dense"] * 5, "swiglu_limits_shared": None}, 0),
        ({"num_nextn_predict_layers": 0}, 0),
        ({"swiglu_limits_shared": [0.0] * 5 + [1.0]}, 0),  # of a dense layer
    ],
    ids=str,
)
def test_layers_that_draft_are_those_that_lists_describe(
    tmp_path: Path, other: dict[str, Any], count: int
) -> None:
    spec = spec_of(tmp_path, PUBLISHED | other)
    assert spec is not None and len(spec.layers) == 5 and len(spec.mtp) == count


@pytest.mark.parametrize(
    "other",
    [
        {"gating": False},
        {"mlp_bias": True},
        {"use_bidirectional_attention": True},
        {"swiglu_limits_shared": [1.0] * 5},  # of a dense layer as well
    ],
    ids=str,
)
def test_what_runs_through_transformers(tmp_path: Path, other: dict[str, Any]) -> None:
    assert spec_of(tmp_path, SIZES | other) is None


def test_the_text_by_itself_has_code_of_its_own(tmp_path: Path) -> None:
    write_json(tmp_path, SIZES | {"model_type": "step3p5"})
    assert decoder_spec(read_config(tmp_path)) is None
