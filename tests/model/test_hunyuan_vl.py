"""What config.json of Hunyuan VL says of rotary positions, and what is refused of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model.support import write_json
from tgi_trio.errors import ModelLoadError
from tgi_trio.model.config import ModelConfig, RopeScaling, read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.image_rules import ImageRules, image_rules
from tgi_trio.shard.positions.rotary_frequencies import rotary_axes, rotary_frequencies

# As HunyuanOCR has it beside its layers.
ROPE: dict[str, Any] = {
    **{"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0},
    **{"mscale_all_dim": 1.0, "type": "xdrope", "xdrope_section": [16, 16, 16, 16]},
}
TEXT: dict[str, Any] = {
    **{"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128},
    **{"intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 120818},
    **{"rope_theta": 10000.0, "rope_scaling": ROPE},
}
WHOLE: dict[str, Any] = {"model_type": "hunyuan_vl", "vision_config": {"spatial_merge_size": 2}}


def read(folder: Path, rope: object = ROPE, **changes: Any) -> ModelConfig:
    write_json(folder, {**WHOLE, **TEXT, "rope_scaling": rope, **changes})
    return read_config(folder)


@pytest.mark.parametrize("nested", [False, True])
def test_it_turns_as_transformers_says(tmp_path: Path, nested: bool) -> None:
    from transformers import AutoConfig
    from transformers.models.hunyuan_vl.modeling_hunyuan_vl import HunYuanVLRotaryEmbedding

    write_json(tmp_path, {**WHOLE, "text_config": TEXT} if nested else {**WHOLE, **TEXT})
    config = read_config(tmp_path)
    theirs = AutoConfig.from_pretrained(tmp_path).get_text_config(decoder=True)
    turning: Any = HunYuanVLRotaryEmbedding(theirs)
    spec = decoder_spec(config)
    assert spec is not None and spec.layers[0].rotary is not None
    frequencies, scale = rotary_frequencies(spec.layers[0].rotary)
    np.testing.assert_allclose(frequencies, turning.inv_freq.numpy(), rtol=1e-6)
    assert scale == turning.attention_scaling == 1.0
    axes = rotary_axes(spec.layers[0].rotary)
    assert axes is not None and axes.tolist() == [part for part in range(4) for _ in range(16)]
    assert image_rules(config) == ImageRules(merge=2, numbered=4)


def test_what_is_not_said_is_as_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoConfig

    theirs = AutoConfig.for_model("hunyuan_vl").get_text_config(decoder=True)
    write_json(tmp_path, {**WHOLE, "text_config": {}})
    spec = decoder_spec(read_config(tmp_path))
    assert spec is not None and spec.norm_eps == theirs.rms_norm_eps
    assert (spec.vocab_size, spec.hidden_size) == (theirs.vocab_size, theirs.hidden_size)
    assert (spec.heads, spec.kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)


def test_a_width_of_heads_by_its_other_name(tmp_path: Path) -> None:
    config = read(tmp_path, head_dim=None, attention_head_dim=128)
    spec = decoder_spec(config)
    assert spec is not None and spec.head_dim == 128


@pytest.mark.parametrize("kind", ["hunyuan_v1_dense", "hunyuan_vl"])
def test_a_flag_takes_the_place_of_the_scaling(tmp_path: Path, kind: str) -> None:
    """Also of one by `alpha` in files of transformers 5, where the sections stay."""
    rope = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 5000.0}
    own = {"rope_parameters": rope | {"mrope_section": [16, 16, 16, 16]}, "rope_scaling": None}
    write_json(tmp_path, {**WHOLE, **TEXT, **own, "model_type": kind})
    config = read_config(tmp_path, RopeScaling("linear", 2.0))
    spec = decoder_spec(config)
    assert spec is not None and (turning := spec.layers[0].rotary) is not None
    assert (turning.kind, turning.theta) == ("linear", 5000.0)
    if kind == "hunyuan_vl":
        assert turning.sections == (16, 16, 16, 16) and image_rules(config).numbered == 4


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ([32, 32], "must be a list of 3 to 5 whole numbers"),
        ([16, 16, 16, 8, 4, 4], "must be a list of 3 to 5 whole numbers"),
        ([16, 16, 16, 16.5], "must be a list of 3 to 5 whole"),
        ([16, 16, 16, True], "must be a list of 3 to 5 whole"),
        ([48, 16, 16, -16], "must be a list of 3 to 5 whole"),
        ([float("nan"), 16, 16, 16], "must be a list of 3 to 5 whole"),
        ({"a": 1}, "must be a list of 3 to 5 whole"),
        ([16, 16, 16], "add up to 64, the pairs of dimensions that turn"),
    ],
    ids=str,
)
def test_sections_that_make_no_sense(tmp_path: Path, sections: Any, why: str) -> None:
    with pytest.raises(ModelLoadError, match=why):
        decoder_spec(read(tmp_path, {**ROPE, "xdrope_section": sections}))


def test_both_names_of_the_sections(tmp_path: Path) -> None:
    same = read(tmp_path, {**ROPE, "mrope_section": [16.0, 16.0, 16.0, 16.0]})
    assert image_rules(same).numbered == 4
    with pytest.raises(ModelLoadError, match=r"mrope_section \[24, 20, 20\], but xdrope_section"):
        decoder_spec(read(tmp_path, {**ROPE, "mrope_section": [24, 20, 20]}))


def test_texts_need_no_sections_and_images_do(tmp_path: Path) -> None:
    config = read(tmp_path, {name: each for name, each in ROPE.items() if "section" not in name})
    assert decoder_spec(config) is not None
    with pytest.raises(ModelLoadError, match=r"has no mrope_section .* which images of"):
        image_rules(config)
