"""What Muse Glimmer's config.json leaves out is what transformers says there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.specs.decoder import DecoderSpec, RotarySpec


def spec_of(folder: Path, config: dict[str, Any]) -> DecoderSpec:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    spec = decoder_spec(read_config(folder))
    assert spec is not None
    # Parameters hold what the file says of frequencies, in its own words.
    layers = (
        replace(layer, rotary=layer.rotary and RotarySpec(layer.rotary.dim, layer.rotary.theta))
        for layer in spec.layers
    )
    return replace(spec, layers=tuple(layers))


@pytest.mark.parametrize("said", [{}, {"sliding_window": 7}, {"num_hidden_layers": 6}], ids=str)
def test_defaults(tmp_path: Path, said: dict[str, Any]) -> None:
    from transformers import AutoConfig

    theirs = AutoConfig.for_model("muse_glimmer", text_config=said).to_dict()
    bare = {"model_type": "muse_glimmer", "text_config": said}
    assert spec_of(tmp_path / "bare", bare) == spec_of(tmp_path / "whole", theirs)
