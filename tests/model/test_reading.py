"""Rotary positions are read as transformers reads them from the same config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model.support import write_json
from tgi_trio.errors import ModelLoadError
from tgi_trio.model.config import RopeScaling, read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.shard.torch_backend.layers.attention.rotary import Rotary
from tgi_trio.testing.checkpoints import tiny_values

HEAD_DIM, POSITIONS = 16, 128
SIZES = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG = {
    "short_factor": [1.0 + 0.1 * i for i in range(HEAD_DIM // 2)],
    "long_factor": [2.0 + 0.3 * i for i in range(HEAD_DIM // 2)],
}
BOTH = {"rope_parameters": PLAIN}  # a checkpoint saved by transformers 5


def write_config(folder: Path, family: str, **changes: Any) -> Any:
    """Write a config.json with exactly these rotary keys; return what transformers reads."""
    from transformers import AutoConfig

    AutoConfig.for_model(family, **SIZES).save_pretrained(folder)
    content = json.loads((folder / "config.json").read_text())
    for name in ("rope_parameters", "rope_scaling", "rope_theta"):
        content.pop(name, None)
    write_json(folder, content | changes)
    return AutoConfig.from_pretrained(folder)


def theirs(config: Any, length: int, layer_type: str | None = None) -> torch.Tensor:
    """Return the cosines of transformers [length, dim] of a sequence of this length."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        kind = type(AutoModelForCausalLM.from_config(config).base_model.rotary_emb)
    module, positions = kind(config), torch.arange(length)[None]
    more = {} if layer_type is None else {"layer_type": layer_type}
    cosines: torch.Tensor = module(torch.zeros(1), positions, **more)[0][0]
    return cosines


def ours(folder: Path, length: int, layer: int = 0, rope: RopeScaling | None = None) -> Any:
    """Return our cosines of the same [length, dim]."""
    spec = decoder_spec(read_config(folder, rope))
    assert spec is not None and spec.layers[layer].rotary is not None
    lengths = torch.full((length,), length)
    found = spec.layers[layer].rotary
    assert found is not None
    rotary = Rotary(found, torch.device("cpu"))
    return rotary.table(torch.arange(length), lengths, torch.float32)[0][:, 0]


@pytest.mark.parametrize("length", [POSITIONS // 2, 2 * POSITIONS])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_theta": 5000.0},
        BOTH,
        *(
            {**before, "rope_scaling": {key: kind, **numbers}}
            for before in ({}, BOTH)
            for key in ("type", "rope_type")
            for kind, numbers in (
                ("linear", {"factor": 4.0}),
                ("dynamic", {"factor": 4.0}),
                ("llama3", LLAMA3),
                ("yarn", {"factor": 4.0, "original_max_position_embeddings": 32}),
                ("longrope", LONG | {"original_max_position_embeddings": 64}),
                ("default", {}),
            )
        ),
        {**BOTH, "rope_scaling": None},
        {**BOTH, "rope_scaling": {}},
        {**BOTH, "rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 7000.0}},
        # The newer kind is not mixed into the older one.
        {
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, **LLAMA3},
            "rope_scaling": {"type": "linear", "factor": 2.0},
        },
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_llama(tmp_path: Path, changes: dict[str, Any], length: int) -> None:
    expected = theirs(write_config(tmp_path, "llama", **changes), length)
    torch.testing.assert_close(ours(tmp_path, length), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3", "granite", "olmo2", "gpt_neox"])
def test_scaling_beside_rope_parameters_counts_in_every_family(tmp_path: Path, family: str) -> None:
    scaled = {"type": "linear", "factor": 4.0}
    config = write_config(tmp_path, family, **BOTH, rope_scaling=scaled)
    expected = theirs(config, POSITIONS)
    found = ours(tmp_path, POSITIONS)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    write_config(tmp_path, family, **BOTH)
    assert not torch.allclose(found, ours(tmp_path, POSITIONS), atol=1e-2)


@pytest.mark.parametrize("family", ["gemma3_text", "olmo3"])
@pytest.mark.parametrize("nested", [False, True])
def test_scaling_is_for_the_layers_that_see_everything(
    tmp_path: Path, family: str, nested: bool
) -> None:
    sets = {"sliding_attention": PLAIN, "full_attention": PLAIN | {"rope_theta": 5e5}}
    before = {"rope_parameters": sets} if nested else {}
    kinds = ["sliding_attention", "full_attention"] * 2
    scaling = {"rope_type": "linear", "factor": 4.0}
    config = write_config(tmp_path, family, **before, layer_types=kinds, rope_scaling=scaling)
    for layer, kind in enumerate(kinds[:2]):
        expected = theirs(config, POSITIONS, kind)
        torch.testing.assert_close(ours(tmp_path, POSITIONS, layer), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_theta": 20000.0},
        BOTH,
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": False}},
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_gpt_oss_turns_by_yarn_where_nothing_is_said(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    expected = theirs(write_config(tmp_path, "gpt_oss", **changes), POSITIONS)  # one of each pair
    found = ours(tmp_path, POSITIONS)
    torch.testing.assert_close(found, expected.repeat(1, 2), atol=2e-5, rtol=0)


def test_gpt_oss_has_windows_in_every_other_layer(tmp_path: Path) -> None:
    for changes in ({}, {"layer_types": None, "sliding_window": None}):
        write_config(tmp_path, "gpt_oss", **changes)
        spec = decoder_spec(read_config(tmp_path))
        assert spec is not None and [layer.window for layer in spec.layers] == [128, 0, 128, 0]


def test_a_base_stated_in_rope_parameters_survives_scaling(tmp_path: Path) -> None:
    """transformers forgets it and takes 10000: the model was not trained with that."""
    newer = PLAIN | {"rope_theta": 5e5}
    older = {"type": "linear", "factor": 2.0}
    complete = write_config(tmp_path, "llama", rope_scaling=older | {"rope_theta": 5e5})
    expected = theirs(complete, POSITIONS)
    write_config(tmp_path, "llama", rope_parameters=newer, rope_scaling=older)
    torch.testing.assert_close(ours(tmp_path, POSITIONS), expected, atol=2e-5, rtol=0)


def tiny(family: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": family, **tiny_values(family), **changes}


@pytest.mark.parametrize(
    "family",
    [
        *("cohere_compass_text", "gemma3_text", "gemma3n_text", "gemma4_text", "laguna", "lfm3"),
        *("mellum", "mimo_v2_flash", "olmo3"),
    ],
)
def test_one_set_where_kinds_of_layers_have_their_own_is_refused(
    tmp_path: Path, family: str
) -> None:
    """transformers passes over it (Gemma 3, OLMo 3), or fails."""
    write_json(tmp_path, tiny(family, rope_parameters=PLAIN | {"rope_theta": 5e5}))
    with pytest.raises(ModelLoadError, match=r"rope_parameters\.\w+_attention is missing"):
        decoder_spec(read_config(tmp_path))


@pytest.mark.parametrize("family", ["gemma4_text", "laguna", "mellum"])
def test_bases_beside_the_sets_do_not_count(tmp_path: Path, family: str) -> None:
    """Nor do rotated parts; transformers' classes read neither, with sets or without."""
    write_json(tmp_path / "plain", tiny(family))
    write_json(tmp_path / "beside", tiny(family, rope_theta=777.0, partial_rotary_factor=0.125))
    plain, beside = (decoder_spec(read_config(tmp_path / name)) for name in ("plain", "beside"))
    assert beside is not None and beside == plain


@pytest.mark.parametrize("kind", ["linear", "dynamic"])
@pytest.mark.parametrize("before", [{}, BOTH, {"rope_scaling": {"type": "llama3", **LLAMA3}}])
def test_scaling_that_was_asked_for_is_the_same_as_in_the_file(
    tmp_path: Path, kind: str, before: dict[str, Any]
) -> None:
    asked = {"rope_type": kind, "factor": 2.0}
    expected = theirs(write_config(tmp_path, "llama", **{**before, "rope_scaling": asked}), 200)
    write_config(tmp_path, "llama", **before)
    found = ours(tmp_path, 200, rope=RopeScaling(kind, 2.0))
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"type": "spiral"}, "'spiral' is not known; known are default, linear"),
        ({"rope_type": "linear"}, "'linear' without its 'factor'"),
        ({"rope_type": "longrope", "short_factor": [1.0]}, "without its 'long_factor'"),
    ],
)
def test_scalings_that_cannot_be_computed_are_named(
    tmp_path: Path, scaling: dict[str, Any], message: str
) -> None:
    write_json(tmp_path, {"model_type": "llama", **SIZES, "rope_scaling": scaling})
    with pytest.raises(ModelLoadError, match=message):
        decoder_spec(read_config(tmp_path))
