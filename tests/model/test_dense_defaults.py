"""What a dense model's config.json leaves out is what its class in transformers takes for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.model.support import write_json
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.spec import DecoderSpec

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 1024,
    "intermediate_size": 96,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}
# Every head has its key and value, as the class says nothing of them.
ALL_HEADS = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
FAMILIES: dict[str, dict[str, Any]] = {
    "biogpt": ALL_HEADS,
    "cwm": SIZES,
    "glm": SIZES,
    "gpt_neo": {"vocab_size": 64, "max_position_embeddings": 512},
    "granite_swa": SIZES,
    "helium": SIZES,
    "hyperclovax": SIZES,
    "iquestcoder": SIZES,
    "jais2": SIZES,
    "minicpm3": SIZES,
    "ministral": SIZES | {"head_dim": 64},
    "nanochat": SIZES,
    "openai-gpt": {"vocab_size": 64},
    "persimmon": ALL_HEADS,
    "xglm": {"vocab_size": 64, "max_position_embeddings": 512},
    "youtu": SIZES,
}


def spec_of(folder: Path) -> DecoderSpec:
    """Return the spec, but for the rotary keys themselves, which plain embeddings do not read."""
    spec = decoder_spec(read_config(folder))
    assert spec is not None
    layers = []
    for layer in spec.layers:
        turning = layer.rotary
        if turning is not None and turning.kind == "default":
            turning = replace(turning, parameters={})
        layers.append(replace(layer, rotary=turning))
    return replace(spec, layers=tuple(layers))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_of_sizes_alone(tmp_path: Path, family: str) -> None:
    from transformers import AutoConfig

    sizes = FAMILIES[family]
    AutoConfig.for_model(family, **sizes).save_pretrained(tmp_path / "whole")
    write_json(tmp_path / "sizes", sizes | {"model_type": family})
    assert spec_of(tmp_path / "sizes") == spec_of(tmp_path / "whole")
