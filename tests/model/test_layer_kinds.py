"""What families say of layers that differ, read from published files and from those of today."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.matrices.decoder import outer_refs
from tgi_trio.model.specs.decoder import DecoderSpec, HeadSizes
from tgi_trio.model.split import Portion, check_split
from tgi_trio.testing.checkpoints import tiny_values

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
# Family, and what published files say that today's say otherwise, or leave to the class.
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4 E": (
        "gemma4_text",
        {"global_head_dim": 32, "num_kv_shared_layers": 6, "use_double_wide_mlp": True},
    ),
    "gemma4": (
        "gemma4_text",
        {
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
        },
    ),
    "gemma4 unified": (
        "gemma4_unified_text",
        {"num_global_key_value_heads": 1, "attention_k_eq_v": True},
    ),
    "gemma3n": (
        "gemma3n_text",
        {"rope_theta": 5e5, "rope_local_base_freq": 5e3, "num_kv_shared_layers": 5},
    ),
    "mimo": (
        "mimo_v2_flash",  # 0.334 of a head turns: an even number
        {"sliding_window_size": 31, "routed_scaling_factor": None, "head_dim": 24},
    ),
}


def spec_of(folder: Path, values: dict[str, Any]) -> DecoderSpec:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    spec = decoder_spec(read_config(folder))
    assert spec is not None
    return spec


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_says_what_transformers_makes_of_it(tmp_path: Path, name: str) -> None:
    from transformers import AutoConfig

    family, said = PUBLISHED[name]
    values = SIZES | {"intermediate_size": 96} | said
    theirs = AutoConfig.for_model(family, **values)
    theirs.save_pretrained(tmp_path / "theirs")
    saved = json.loads((tmp_path / "theirs" / "config.json").read_text())
    published = spec_of(tmp_path / "published", {"model_type": family} | values)
    today = spec_of(tmp_path / "today", saved)
    for i, (layer, other) in enumerate(zip(published.layers, today.layers, strict=True)):
        assert published.sizes(layer) == today.sizes(other), i
        assert layer.rotary and other.rotary
        turned = [(r.dim, r.theta, r.kind) for r in (layer.rotary, other.rotary)]
        assert turned[0] == turned[1], i
        same = ("window", "experts", "keys_as_values", "reads_layer", "mlp_width", "sparsity")
        assert [getattr(layer, key) for key in same] == [getattr(other, key) for key in same], i
    assert (
        published.per_layer_inputs == today.per_layer_inputs and published.streams == today.streams
    )
    assert (published.value_scale, published.norm_eps) == (today.value_scale, today.norm_eps)


def test_sizes_may_be_told_by_kind_of_layer(tmp_path: Path) -> None:
    values = SIZES | {"model_type": "gemma4_text", "intermediate_size": 96}
    by_kind = {"full_attention": {"head_dim": 32, "num_key_value_heads": 1}}
    spec = spec_of(tmp_path, values | {"per_layer_config": by_kind})
    assert spec.layers[5].sizes == HeadSizes(1, 32, 32) and spec.layers[4].sizes is None


def test_the_last_layer_of_gemma_4_sees_everything(tmp_path: Path) -> None:
    values = SIZES | {"model_type": "gemma4_text", "intermediate_size": 96}
    spec = spec_of(tmp_path, values | {"layer_types": ["sliding_attention"] * 12})
    assert [layer.window for layer in spec.layers] == [512] * 11 + [0]


def test_who_sees_what_follows_is_none_of_ours(tmp_path: Path) -> None:
    values = SIZES | {"model_type": "gemma4_text", "intermediate_size": 96}
    (tmp_path / "config.json").write_text(
        json.dumps(values | {"use_bidirectional_attention": "all"})
    )
    assert decoder_spec(read_config(tmp_path)) is None


def test_heads_of_every_kind_of_layer_have_to_divide(tmp_path: Path) -> None:
    values = SIZES | {
        "model_type": "gemma4_text",
        "intermediate_size": 96,
        "num_attention_heads": 6,
    }
    per_layer = {"full_attention": {"head_dim": 32, "num_key_value_heads": 3}}
    spec = spec_of(tmp_path, values | {"per_layer_config": per_layer})
    check_split(spec, 1)
    with pytest.raises(ModelLoadError, match="3 key-value heads cannot be split over 2 shards"):
        check_split(spec, 2)


def test_gates_that_are_cut_together_are_not_split(tmp_path: Path) -> None:
    """Before a rank is spawned."""
    values = SIZES | {"model_type": "gemma3n_text", "intermediate_size": 96}
    spec = spec_of(tmp_path, values | {"num_kv_shared_layers": 5})
    assert [layer.sparsity for layer in spec.layers] == [0.95] * 10 + [0.0] * 2
    with pytest.raises(ModelLoadError, match="not split over shards here; use --num-shard 1"):
        check_split(spec, 2)


@pytest.mark.parametrize("ranks", [2, 3, 33])
def test_tokens_with_tables_of_their_own_are_split_as_one_vocabulary(
    tmp_path: Path, ranks: int
) -> None:
    """Each rank has so many of the next tokens, the last one what is left."""
    values = SIZES | {"model_type": "idefics", "intermediate_size": 96, "additional_vocab_size": 2}
    spec = spec_of(tmp_path, values | {"cross_layer_interval": 4})
    assert [i for i, layer in enumerate(spec.layers) if layer.cross_attention] == [0, 5, 10]
    assert (spec.vocab_size, spec.added_tokens) == (66, 2)
    tables = {"model.embed_tokens.weight": 0, "model.embed_tokens.additional_embedding.weight": 64}
    each = -(-66 // ranks)
    for rank in range(ranks):
        share = Portion(rank, ranks).share
        rows = [
            range(66)[tables[cut.matrix.name] :][cut.rows]
            for cut in outer_refs(spec).embedding.cuts(share)
        ]
        assert [id for part in rows for id in part] == list(range(66))[each * rank :][:each]


def test_gpt_sw3_is_gpt_2_by_another_name(tmp_path: Path) -> None:
    values = {"vocab_size": 64, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32}
    spec = spec_of(tmp_path, values | {"model_type": "gpt-sw3"})
    assert replace(spec, family="gpt2") == spec_of(tmp_path, values | {"model_type": "gpt2"})


def test_layers_of_gpt_neo_have_to_be_named(tmp_path: Path) -> None:
    values = SIZES | {"model_type": "gpt_neo", "num_layers": 4, "num_heads": 4}
    spec = spec_of(tmp_path, values | {"attention_types": [[["global", "local"], 2]]})
    assert [layer.window for layer in spec.layers] == [0, 256, 0, 256]
    for wrong in ([[["global", "local"], 3]], [[["global", "bsparse"], 2]]):
        with pytest.raises(ModelLoadError, match="no 'global' or 'local' for each layer"):
            spec_of(tmp_path, values | {"attention_types": wrong})


@pytest.mark.parametrize("said", [{"clip_qkv": 8.0}, {"use_sliding_window": True}])
def test_what_transformers_refuses_of_iquest_coder_is_none_of_ours(
    tmp_path: Path, said: dict[str, Any]
) -> None:
    values = SIZES | {"model_type": "iquestcoder", "intermediate_size": 96} | said
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert decoder_spec(read_config(tmp_path)) is None


def test_layers_of_gpt_neo_are_those_that_are_listed(tmp_path: Path) -> None:
    """As in transformers, which makes the list of the pattern where there is none."""
    sizes = {"model_type": "gpt_neo", "hidden_size": 64, "num_heads": 4, "num_layers": 2}
    sizes |= {"vocab_size": 64, "max_position_embeddings": 64, "window_size": 8}
    pattern = {"attention_types": [[["global", "local"], 1]]}
    listed = spec_of(tmp_path, sizes | pattern | {"attention_layers": ["local", "global"]})
    assert [layer.window for layer in listed.layers] == [8, 0]
    assert [layer.window for layer in spec_of(tmp_path, sizes | pattern).layers] == [0, 8]
    with pytest.raises(ModelLoadError, match="'global' or 'local' for each layer"):
        spec_of(tmp_path, sizes | {"attention_layers": ["local"]})


def test_positions_of_xglm_are_said(tmp_path: Path) -> None:
    """They are computed, so that no tensor shows how many there are."""
    with pytest.raises(ModelLoadError, match="no 'max_position_embeddings'"):
        spec_of(tmp_path, {"model_type": "xglm", "vocab_size": 64, "pad_token_id": 1})


@pytest.mark.parametrize("taps", [0, 1])
def test_a_convolution_of_one_token_is_none(tmp_path: Path, taps: int) -> None:
    lfm2 = {"model_type": "lfm2", "intermediate_size": 128, "layer_types": ["conv"] * 12}
    assert spec_of(tmp_path, SIZES | lfm2 | {"conv_L_cache": 2}).layers[0].mixer is not None
    with pytest.raises(ModelLoadError, match="no convolution over tokens"):
        spec_of(tmp_path, SIZES | lfm2 | {"conv_L_cache": taps})


@pytest.mark.parametrize(
    "family", ["afmoe", "cohere2_moe", "gemma3_text", "mimo_v2_flash", "qwen2"]
)
def test_other_kinds_of_layers_are_not_taken_for_full_attention(
    tmp_path: Path, family: str
) -> None:
    values = {"model_type": family, **tiny_values(family)}
    kinds = ["chunked_attention"] * int(values["num_hidden_layers"])
    with pytest.raises(ModelLoadError, match="layer_types has 'chunked_attention', which"):
        spec_of(tmp_path, values | {"layer_types": kinds})
