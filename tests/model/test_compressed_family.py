"""DeepSeek V4 and Hunyuan 4 as config.json describes them, in present and older words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.published_names import rename_family
from tgi_trio.model.specs.decoder import CompressionSpec, DecoderSpec
from tgi_trio.model.speculators.eagle import check_hidden_states
from tgi_trio.model.stages import check_stages

YARN = {"factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}
SIZES = {"num_hidden_layers": 5, "hidden_size": 64, "head_dim": 512, "vocab_size": 32}
# As the hub's files say it, where layers that draft further tokens are counted among the ratios.
OLDER = SIZES | {
    "compress_ratios": [0, 0, 4, 128, 4, 0],
    "num_hash_layers": 2,
    "qk_rope_head_dim": 64,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {"type": "yarn", **YARN},
}
NEWER = SIZES | {
    "layer_types": [
        "sliding_attention",
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe", "moe"],
    "partial_rotary_factor": 0.125,
    "rope_parameters": {
        "main": {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.125},
        "compress": {
            "rope_type": "yarn",
            "rope_theta": 160000,
            "partial_rotary_factor": 0.125,
            "attention_factor": 1.0,
            **YARN,
        },
    },
}


def spec_of(values: dict[str, Any], kind: str = "deepseek_v4") -> DecoderSpec | None:
    return decoder_spec(ModelConfig(Path(), kind, None, 32, 1 << 20, (), values))


def served(values: dict[str, Any]) -> DecoderSpec:
    spec = spec_of(values)
    assert spec is not None
    return spec


def test_older_words_mean_the_same() -> None:
    older, newer = served(OLDER), served(NEWER)
    for old, new in zip(older.layers, newer.layers, strict=True):
        assert (old.experts, old.sizes, old.window) == (new.experts, new.sizes, new.window)
        assert old.rotary is not None and new.rotary is not None
        for name in ("dim", "theta", "kind", "interleaved"):
            assert getattr(old.rotary, name) == getattr(new.rotary, name)
        assert old.rotary.parameters.get("attention_factor") == new.rotary.parameters.get(
            "attention_factor"
        )
    kinds = [layer.compression and layer.compression.rate for layer in older.layers]
    assert kinds == [None, None, 4, 128, 4]
    assert [layer.rotary and layer.rotary.theta for layer in older.layers] == [
        *(10000, 10000),
        *(160000, 160000, 160000),
    ]


def test_what_is_left_out_is_as_published() -> None:
    layers = served(SIZES).layers
    kinds = [layer.compression and layer.compression.rate for layer in layers]
    assert kinds == [128, 128, 128, 4, 128]
    assert [bool(layer.experts and layer.experts.by_token) for layer in layers] == [
        *(True, True, True),
        *(False, False),
    ]


@pytest.mark.parametrize(
    ("other", "count"),
    [
        ({}, 1),
        ({"num_nextn_predict_layers": 0}, 0),
        ({"num_nextn_predict_layers": 2}, 2),
        ({"compress_ratios": [0, 0, 4, 128, 4, 4]}, 0),  # published ones have no entries
    ],
    ids=str,
)
def test_layers_that_draft_attend_to_a_window(other: dict[str, Any], count: int) -> None:
    spec = served(OLDER | other)
    assert len(spec.layers) == 5 and len(spec.mtp) == count
    for layer in spec.mtp:
        assert layer.experts is not None and not layer.experts.by_token
        assert (layer.compression, layer.rotary) == (None, spec.layers[0].rotary)


def test_a_token_keeps_its_key_and_what_entries_are_made_of() -> None:
    assert CompressionSpec(128, overlaps=False, index=None).kept(512) == 2 * 512
    sparse = served(OLDER).layers[2]
    assert sparse.sizes is not None and sparse.sizes.dim == 512 + 4 * 512 + 4 * 128


@pytest.mark.parametrize(
    "odd",
    [
        {"scoring_func": "sigmoid"},
        {"mlp_bias": True},
        {"swiglu_limit": 0.0},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    ],
)
def test_variants_that_no_model_is_run_through_transformers(odd: dict[str, Any]) -> None:
    assert spec_of(OLDER | odd) is None


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ({"o_groups": 7}, "64 attention heads cannot be 7 groups"),
        ({"compress_ratios": [0, 4, 8, 4, 4]}, "0, 4 and 128, not 8"),
        ({"layer_types": ["full_attention"] * 5}, "layer_types must name 5 layers"),
        ({"mlp_layer_types": ["moe"] * 4}, "mlp_layer_types must name 5 layers"),
        ({"compress_rates": {"compressed_sparse_attention": 0}}, "must be positive, not 0"),
    ],
)
def test_what_makes_no_model_is_named(odd: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        spec_of(OLDER | odd)


def test_what_hunyuan_4_leaves_out_is_as_published() -> None:
    spec = spec_of({"num_hidden_layers": 7}, "hy_v4")
    assert spec is not None and spec.hyper is not None and spec.index is not None
    assert [layer.chooses for layer in spec.layers] == [
        *(True, True, False, False),
        *(False, True, False),
    ]
    assert [layer.experts is not None for layer in spec.layers] == [False] + [True] * 6
    experts = spec.layers[1].experts
    assert experts is not None and (experts.limit, experts.width) == (10.0, 768)
    assert experts.shared_limit == 0.0 and not experts.raised
    assert (spec.hyper.iterations, spec.hyper.added, spec.index.heads) == (0, 2.0, 16)
    assert (spec.hidden_size, spec.heads, spec.norm_eps) == (2816, 32, 1e-5)


@pytest.mark.parametrize(
    "odd",
    [
        {"swiglu_limit": 0.0},
        {"layer_types": ["full_attention"] * 7},
        {"q_lora_rank": 0},
        {"hidden_act": "gelu"},
    ],
)
def test_variants_of_hunyuan_4_that_no_model_is(odd: dict[str, Any]) -> None:
    assert spec_of({"num_hidden_layers": 7} | odd, "hy_v4") is None


def test_what_reads_a_hidden_state_of_layers_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="not cut into stages"):
        check_stages(served(OLDER), 2)
    with pytest.raises(Exception, match="have several"):
        check_hidden_states(Path("drafter"), served(OLDER))


def test_names_of_published_files() -> None:
    pairs = {
        "embed.weight": "embed_tokens.weight",
        "head.weight": "lm_head.weight",
        "norm.weight": "norm.weight",
        "hc_head_fn": "hc_head.hc_fn",
        "layers.0.attn_norm.weight": "layers.0.input_layernorm.weight",
        "layers.0.hc_ffn_scale": "layers.0.ffn_hc.scale",
        "layers.2.attn.wq_a.scale": "layers.2.self_attn.q_a_proj.weight_scale_inv",
        "layers.2.attn.kv_norm.weight": "layers.2.self_attn.kv_norm.weight",
        "layers.2.attn.compressor.norm.weight": "layers.2.self_attn.compressor.kv_norm.weight",
        "layers.2.attn.indexer.compressor.ape": (
            "layers.2.self_attn.compressor.indexer.position_bias"
        ),
        "layers.2.attn.indexer.wq_b.weight": (
            "layers.2.self_attn.compressor.indexer.q_b_proj.weight"
        ),
        "layers.2.attn.wq_b.weight": "layers.2.self_attn.q_b_proj.weight",
        "layers.2.ffn.experts.3.w2.scale": "layers.2.mlp.experts.3.down_proj.weight_scale_inv",
        "layers.2.ffn.gate.bias": "layers.2.mlp.gate.e_score_correction_bias",
        "layers.2.ffn.gate.tid2eid": "layers.2.mlp.gate.tid2eid",
        "layers.2.self_attn.sinks": "layers.2.self_attn.sinks",  # as transformers names its own
    }
    assert list(rename_family(pairs, "deepseek_v4")) == list(pairs.values())
    assert list(rename_family(pairs, "llama")) == list(pairs)
