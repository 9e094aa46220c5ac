"""What config.json leaves out is what the family's class of transformers takes for it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.model.support import write_json
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.specs.decoder import DecoderSpec, RotarySpec
from tgi_trio.shard.positions.rotary_frequencies import rotary_frequencies

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
FEW: dict[str, Any] = {"vocab_size": 64, "max_position_embeddings": 512}
FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("afmoe", "axk1", "axk2", "cohere2_moe", "exaone4", "exaone_moe", "flex_olmo"), SIZES
    ),
    **dict.fromkeys(("flint", "granitemoeshared", "granitemoe_swa", "kolibri1", "laguna"), SIZES),
    **dict.fromkeys(
        (
            "exaone",
            "mellum",
            "sarvam_mla",
            "sarvam_moe",
            "solar_open",
            "cwm",
            "glm",
            "granite_swa",
            "helium",
        ),
        SIZES,
    ),
    **dict.fromkeys(
        ("hyperclovax", "iquestcoder", "jais2", "minicpm3", "nanochat", "vaultgemma"), SIZES
    ),
    **dict.fromkeys(("biogpt", "persimmon"), ALL_HEADS),
    "bailing_hybrid": {"vocab_size": 64, "hidden_size": 1024, "num_hidden_layers": 12}
    | {"num_attention_heads": 16, "model_max_length": 512},
    "gpt_neo": FEW,
    "gptj": {"vocab_size": 64, "n_positions": 512},
    "longcat_flash": SIZES | {"num_layers": 6},
    "ministral": SIZES | {"head_dim": 64},
    "mixtral": SIZES | {"num_local_experts": 4},
    "openai-gpt": {"vocab_size": 64},
    "qwen3_next": SIZES | {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2},
    "xglm": FEW,
    "youtu": SIZES,
}


def spec_of(folder: Path) -> DecoderSpec:
    """Return the spec, but for the rotary keys themselves, which plain embeddings do not read."""
    spec = decoder_spec(read_config(folder))
    assert spec is not None
    layers = (replace(layer, rotary=_without_keys(layer.rotary)) for layer in spec.layers)
    index = spec.index
    if index is not None:
        index = replace(index, rotary=_without_keys(index.rotary) or index.rotary)
    return replace(spec, layers=tuple(layers), index=index)


def _without_keys(rotary_spec: RotarySpec | None) -> RotarySpec | None:
    if rotary_spec is None or rotary_spec.kind != "default":
        return rotary_spec
    return replace(rotary_spec, parameters={})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_of_sizes_alone(tmp_path: Path, family: str) -> None:
    from transformers import AutoConfig

    sizes = FAMILIES[family]
    AutoConfig.for_model(family, **sizes).save_pretrained(tmp_path / "whole")
    write_json(tmp_path / "sizes", sizes | {"model_type": family})
    assert spec_of(tmp_path / "sizes") == spec_of(tmp_path / "whole")


@pytest.mark.parametrize("family", ["exaone4", "exaone_moe"])
def test_a_pattern_of_letters(tmp_path: Path, family: str) -> None:
    """As on the hub, where every kind of layer is written out as well, or is not."""
    values = SIZES | {"model_type": family, "rope_theta": 5e5}
    write_json(tmp_path / "number", values | {"sliding_window_pattern": 3})
    write_json(tmp_path / "letters", values | {"sliding_window_pattern": "LLG"})
    assert spec_of(tmp_path / "letters") == spec_of(tmp_path / "number")


@pytest.mark.parametrize(
    ("family", "published"),
    [
        (
            "exaone",
            {"num_layers": 12, "layer_norm_epsilon": 1e-6, "activation_function": "silu"}
            | {"rope_theta": 1e6, "head_dim": 64},
        ),
        (
            "sarvam_moe",
            {"num_experts": 8, "num_shared_experts": 2, "use_qkv_bias": True, "rope_theta": 1e6}
            | {"moe_intermediate_size": 32, "head_dim": 64, "num_hidden_layers": 3},
        ),
        (
            "sarvam_mla",
            {"num_experts": 8, "num_shared_experts": 2, "head_dim": 576, "q_head_dim": 192}
            | {"num_hidden_layers": 3, "rope_theta": 1e6}
            | {
                "rope_scaling": {
                    **{"type": "deepseek_yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1},
                    **{"mscale": 1.0, "mscale_all_dim": 1.0},
                    "original_max_position_embeddings": 64,
                }
            },
        ),
    ],
)
def test_names_that_the_makers_published(
    tmp_path: Path, family: str, published: dict[str, Any]
) -> None:
    """Those of the code that came with the files, which transformers' class translates."""
    from transformers import AutoConfig

    sizes = {name: size for name, size in SIZES.items() if name != "num_hidden_layers"}
    write_json(tmp_path / "published", sizes | published | {"model_type": family})
    AutoConfig.from_pretrained(tmp_path / "published").save_pretrained(tmp_path / "whole")
    ours, theirs = spec_of(tmp_path / "published"), spec_of(tmp_path / "whole")
    plain = [
        replace(each, layers=tuple(replace(la, rotary=None) for la in each.layers))
        for each in (ours, theirs)
    ]
    assert plain[0] == plain[1]
    for own, other in zip(ours.layers, theirs.layers, strict=True):
        assert own.rotary is not None and other.rotary is not None
        found, expected = map(rotary_frequencies, (own.rotary, other.rotary))
        assert found[0].tolist() == expected[0].tolist() and found[1] == expected[1]


def test_first_layers_of_cohere_are_dense_by_their_number(tmp_path: Path) -> None:
    from transformers import AutoConfig

    values = SIZES | {"first_k_dense_replace": 2, "prefix_dense_sliding_window_pattern": 2}
    AutoConfig.for_model("cohere2_moe", **values).save_pretrained(tmp_path / "whole")
    content = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert content["mlp_layer_types"].count("dense") == 2
    write_json(tmp_path / "number", values | {"model_type": "cohere2_moe"})
    assert spec_of(tmp_path / "number") == spec_of(tmp_path / "whole")
