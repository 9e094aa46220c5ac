"""Whatever a config.json says is served or refused, and no number that makes no sense is served."""

from __future__ import annotations

import random
from math import inf, nan
from pathlib import Path
from typing import Any, Final

import pytest

from tests.model.support import LLAMA, MISSING, Asked, changed, make_folder, places, write_json
from tgi_trio.errors import ModelLoadError
from tgi_trio.model.check import check_model, model_spec
from tgi_trio.model.config import read_config
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.model.speculators.recognise import find_kind
from tgi_trio.testing.checkpoints import tiny_values
from tgi_trio.testing.tiny_families import ABSENT

# What may stand anywhere. JSON has no infinity and no NaN, but Python writes and reads both.
ANYTHING: Final[tuple[Any, ...]] = (
    *(MISSING, None, True, "x", -1, 0, 3, 0.5, 10**8, 10**30, inf, nan),
    *([], [1], [None], {}, {"a": 1}),
)
# Attention of all kinds, mixtures, states, an encoder.
FAMILIES: Final = (
    *("llama", "gemma3_text", "gemma3n_text", "gpt2", "mpt", "falcon", "phi3"),
    *("gpt_oss", "deepseek_v3", "deepseek_v32", "llama4_text", "longcat_flash"),
    *("mamba", "mamba2", "jamba", "falcon_h1", "zamba2", "nemotron_h", "lfm2", "qwen3_next"),
    *("kimi_linear", "bailing_hybrid", "recurrent_gemma", "qwen4_exp_text", "t5", "dbrx"),
)


def config_of(family: str) -> dict[str, Any]:
    """Return a small config.json of a family."""
    values = tiny_values(family).items()
    return {"model_type": family, "eos_token_id": 1} | {k: v for k, v in values if v is not ABSENT}


@pytest.mark.parametrize("family", FAMILIES)
def test_any_value_anywhere_is_served_or_refused(family: str, tmp_path: Path) -> None:
    config = config_of(family)
    make_folder(tmp_path, config)
    check_model(read_config(tmp_path), Asked())
    draw = random.Random(family)
    cases = [(path, value) for path in places(config) for value in ANYTHING]
    for path, value in draw.sample(cases, min(len(cases), 60)):
        write_json(tmp_path, changed(config, path, value))
        try:
            find_kind(tmp_path)
            check_model(read_config(tmp_path), Asked())
        except ModelLoadError as error:
            assert str(error)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rms_norm_eps": nan}, "norm_eps would be nan, and has to be a number of at least 0"),
        ({"rms_norm_eps": inf}, "norm_eps would be inf, and has to be a number .*, below 1"),
        ({"rms_norm_eps": -1e-6}, "norm_eps would be -1e-06"),
        ({"rope_theta": -10000.0}, "theta would be -10000.0, and has to be a number above 0"),
        ({"rope_theta": nan}, "theta would be nan"),
        ({"hidden_size": inf}, "cannot be computed with, .*: hidden_size is inf"),
        ({"num_attention_heads": 0}, "cannot be computed with, .*: num_attention_heads is 0"),
        ({"num_key_value_heads": -1}, "kv_heads would be -1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000, .* below 4097"),
        ({"vision_config": {"depth": 10**9}}, "vision_config.depth 1000000000, .* below 4097"),
        ({"num_hidden_layers": 0}, "it would have 0 layers"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers '2', which is no whole number"),
        ({"model_type": ["llama"]}, "model_type .*, which is no text"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor of its rotary scaling is 0"),
        ({"rope_scaling": {"type": "linear", "factor": "4"}}, "factor .* is '4', and has to be"),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": nan}}, "beta_fast .* is nan"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 2, "long_factor": [2.0]}},
            "short_factor must be a list of 1 numbers above 0",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [0]}},
            "long_factor must be a list of 1 numbers above 0",
        ),
    ],
)
def test_numbers_that_no_model_has_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make_folder(tmp_path)
    write_json(tmp_path, LLAMA | changes)
    with pytest.raises(ModelLoadError, match=message):
        check_model(read_config(tmp_path), Asked())


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        # Layers are counted in two ways.
        ("gemma3_text", {"num_hidden_layers": 1}, "names 2 layers, and num_hidden_layers is 1"),
        # Experts without end are not listed.
        ("gpt_oss", {"num_local_experts": 10**9}, "have 2000000000 experts: up to 262144"),
        ("t5", {"decoder_start_token_id": 512}, "is 512, and there are 512"),
    ],
)
def test_numbers_that_contradict_a_familys_others_are_refused(
    family: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = config_of(family)
    make_folder(tmp_path, config)
    write_json(tmp_path, config | changes)
    with pytest.raises(ModelLoadError, match=message):
        model_spec(read_config(tmp_path))


def test_no_bound_of_a_time_step_is_no_nonsense(tmp_path: Path) -> None:
    """Published files of Mamba 2 say that it is infinite."""
    config = config_of("mamba2")
    write_json(tmp_path, config | {"time_step_limit": [0.0, inf]})
    assert isinstance(model_spec(read_config(tmp_path)), DecoderSpec)
