"""What families that transformers has not say of themselves, and what is refused of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from tests.model.support import LLAMA, Asked, make_folder, write_json
from tgi_trio.errors import ModelLoadError
from tgi_trio.model.check import check_model
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.specs.decoder import DecoderSpec

SIZES: Final[dict[str, Any]] = {
    **{"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
}
CHATGLM: Final[dict[str, Any]] = {
    **{"padded_vocab_size": 64, "hidden_size": 64, "ffn_hidden_size": 96, "num_layers": 2},
    **{"num_attention_heads": 4, "kv_channels": 16, "multi_query_attention": True},
    **{"multi_query_group_num": 2, "seq_length": 512, "add_qkv_bias": True},
}
LING: Final[dict[str, Any]] = SIZES | {
    **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    **{"num_shared_experts": 1, "use_bias": False},
}
SPARSE: Final[dict[str, Any]] = {"kernel_size": 32, "block_size": 64, "topk": 64}
MINICPM: Final[dict[str, Any]] = SIZES | {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16}


def spec_of(folder: Path, model_type: str, **said: Any) -> DecoderSpec | None:
    write_json(folder, said | {"model_type": model_type})
    return decoder_spec(read_config(folder))


@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        ("chatglm", SIZES | {"num_layers": 2, "position_encoding_2d": True}),  # the first
        ("chatglm", SIZES),
        ("chatglm", CHATGLM | {"vision_config": {"hidden_size": 8}}),
        ("chatglm", CHATGLM | {"rmsnorm": False}),
        ("chatglm", CHATGLM | {"post_layer_norm": False}),
        ("chatglm", CHATGLM | {"pre_seq_len": 128}),
        ("chatglm", CHATGLM | {"quantization_bit": 4}),
        ("xverse", SIZES | {"num_experts": 64}),
        ("minicpm", MINICPM | {"mixer_types": ["lightning-attn", "minicpm4"]}),
        ("bailing_moe", LING | {"norm_head": True}),
        ("bailing_moe", LING | {"use_bias": True}),
    ],
)
def test_other_layers_are_none_of_ours(
    tmp_path: Path, model_type: str, said: dict[str, Any]
) -> None:
    make_folder(tmp_path, LLAMA)
    assert spec_of(tmp_path, model_type, **said) is None
    with pytest.raises(ModelLoadError, match="computed here, but not with all"):
        check_model(read_config(tmp_path), Asked())


def test_chatglm_counts_the_rows_that_there_are(tmp_path: Path) -> None:
    found = spec_of(tmp_path, "chatglm", **CHATGLM, vocab_size=60)
    assert found is not None and found.vocab_size == 64
    assert read_config(tmp_path).max_positions == 512


@pytest.mark.parametrize("ratio", [1, 50, 500])
def test_chatglm_3_turns_by_a_larger_base(tmp_path: Path, ratio: int) -> None:
    said = CHATGLM | {"padded_vocab_size": 65024, "rope_ratio": ratio}
    found = spec_of(tmp_path, "chatglm", **said)
    assert found is not None and found.layers[0].rotary is not None
    assert found.layers[0].rotary.theta == 10000.0 * ratio


def test_a_ratio_that_may_be_of_chatglm_2_is_refused(tmp_path: Path) -> None:
    said = CHATGLM | {"padded_vocab_size": 65024, "rope_ratio": 16}
    with pytest.raises(ModelLoadError, match="ChatGLM 2 divides positions by it"):
        spec_of(tmp_path, "chatglm", **said)


def test_ling_is_told_apart_by_its_class(tmp_path: Path) -> None:
    first = spec_of(tmp_path, "bailing_moe", **LING, architectures=["BailingMoeForCausalLM"])
    second = spec_of(tmp_path, "bailing_moe", **LING, architectures=["BailingMoeV2ForCausalLM"])
    assert first is not None and second is not None
    assert (first.query_key_norm, second.query_key_norm) == ("none", "head")
    experts = first.layers[0].experts, second.layers[0].experts
    assert [each and each.routing for each in experts] == ["softmax", "grouped-sigmoid"]
    assert second.names.choice_bias and not first.names.choice_bias
    assert spec_of(tmp_path, "bailing_moe_v2", **LING) == replace(second, family="bailing_moe_v2")


@pytest.mark.parametrize(
    ("said", "length", "warned"),
    [
        ({}, 512, False),
        ({"sparse_config": None}, 512, False),
        ({"sparse_config": SPARSE}, 512, False),  # of 8192, by default
        ({"sparse_config": SPARSE | {"dense_len": 256}}, 255, True),
        ({"sparse_config": SPARSE | {"dense_len": 4096}}, 512, False),
    ],
)
def test_sequences_end_where_attention_would_be_sparse(
    tmp_path: Path, said: dict[str, Any], length: int, warned: bool
) -> None:
    make_folder(tmp_path, MINICPM | said | {"model_type": "minicpm"})
    config = read_config(tmp_path)
    assert (config.max_positions, config.trained_positions) == (length, 512)
    warnings = check_model(config, Asked())
    assert [f"{length} tokens at most instead of 512" in each for each in warnings] == [
        True
    ] * warned


@pytest.mark.parametrize("dense", [-1, 0, 1, True, "x", None])
def test_attention_that_is_always_sparse_is_refused(tmp_path: Path, dense: object) -> None:
    write_json(tmp_path, MINICPM | {"model_type": "minicpm", "sparse_config": {"dense_len": dense}})
    with pytest.raises(ModelLoadError, match="sparse in every sequence"):
        read_config(tmp_path)


@pytest.mark.parametrize(("longest", "own"), [(512, 3.0), (128, 2.0), (64, 2.0)])
def test_minicpm_turns_by_one_set_of_divisors(tmp_path: Path, longest: int, own: float) -> None:
    rope = {
        **{"rope_type": "longrope", "original_max_position_embeddings": 128},
        **{"short_factor": [2.0] * 8, "long_factor": [3.0] * 8},
    }
    said = MINICPM | {"max_position_embeddings": longest, "rope_scaling": rope}
    found = spec_of(tmp_path, "minicpm", **said)
    assert found is not None and found.layers[0].rotary is not None
    turning = found.layers[0].rotary
    assert (turning.kind, turning.parameters["short_factor"]) == ("divided", [own] * 8)
