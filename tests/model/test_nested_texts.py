"""Composite models: the text is what the nested config says, whatever stands beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.model.support import write_json
from tgi_trio.model.config import RopeScaling, read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.testing.tiny_families import ABSENT
from tgi_trio.testing.whole_options import BESIDE
from tgi_trio.testing.wrapped_families import FAMILIES, TEXT

# What texts' families read, and whole models may state for other ends, or have left from a form
# without a nested config.
BESIDE_TEXT: dict[str, Any] = {
    "attention_bias": True,
    "head_dim": 48,
    "hidden_act": "relu",
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 0.5,
    "rope_scaling": {"rope_type": "linear", "factor": 3.0},
    "rope_theta": 777.0,
    "sliding_window": 3,
    "use_sliding_window": True,
}
NESTED = sorted(FAMILIES.keys() - {"idefics", "pixtral"})  # flat; a llava


def spec_of(folder: Path, values: dict[str, Any], rope: RopeScaling | None = None) -> DecoderSpec:
    write_json(folder, values)
    spec = decoder_spec(read_config(folder, rope))
    assert spec is not None
    return spec


def values_of(family: str) -> dict[str, Any]:
    inner, vision = FAMILIES[family]
    options = {name: value for name, value in (TEXT | inner).items() if value is not ABSENT}
    beside = {"model_type": family, "vision_config": vision, **BESIDE.get(family, {})}
    return {**beside, "text_config": options}


@pytest.mark.parametrize("family", NESTED)
def test_what_stands_beside_a_text_is_not_the_texts(tmp_path: Path, family: str) -> None:
    """As in transformers, whose class of the text is made of `text_config` alone."""
    values = values_of(family)
    assert spec_of(tmp_path, {**BESIDE_TEXT, **values}) == spec_of(tmp_path, values)


@pytest.mark.parametrize("family", ["llava", "mistral3", "qwen3_5"])
def test_rotary_flags_are_the_texts(tmp_path: Path, family: str) -> None:
    values = values_of(family)
    scaling = {"rope_type": "linear", "factor": 2.0}
    text = values["text_config"] | {"rope_scaling": scaling}
    flagged = spec_of(tmp_path, values, RopeScaling("linear", 2.0))
    stated = spec_of(tmp_path, values | {"text_config": text})
    assert flagged == replace(stated, position_rows=flagged.position_rows)
    assert any(layer.rotary and layer.rotary.kind == "linear" for layer in flagged.layers)


@pytest.mark.parametrize(
    ("family", "text", "scale", "cap"),
    [
        ("aya_vision", {"model_type": "cohere2", "logit_scale": 0.25}, 0.25, 0.0),
        ("cohere2_vision", {"model_type": "cohere2", "logit_scale": 0.25}, 0.25, 0.0),
        ("llava_next", {"model_type": "granite", "logits_scaling": 8.0}, 0.125, 0.0),
        ("gemma3", {"final_logit_softcapping": 20.0}, 1.0, 20.0),
    ],
)
def test_what_a_texts_family_does_to_logits_is_done(
    tmp_path: Path, family: str, text: dict[str, Any], scale: float, cap: float
) -> None:
    """Newer classes of transformers for images and text leave it out."""
    values = values_of(family)
    spec = spec_of(tmp_path, values | {"text_config": values["text_config"] | text})
    assert (spec.logit_scale, spec.final_soft_cap) == (scale, cap)
