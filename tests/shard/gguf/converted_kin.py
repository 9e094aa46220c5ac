"""What llama.cpp's converter makes of relatives of Llama, GLM, DeepSeek, Gemma; see `converted.py`.

Those that transformers does not have (InternLM 2, XVERSE, EXAONE, Pangu, MiniCPM, Orion, Maincoder)
are written from checkpoints of families that compute the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.shard.gguf.conversion import (
    Array,
    Config,
    Tensors,
    common,
    halves_of_latents,
    llama3_divisors,
    side_by_side,
)


def describe_jais2(config: Config) -> dict[str, Any]:
    return common(config) | {"attention.layer_norm_epsilon": config["layer_norm_eps"]}


def describe_chatglm(config: Config) -> dict[str, Any]:
    return common(config) | {"rope.dimension_count": config["head_dim"] // 2}


def describe_minicpm3(config: Config) -> dict[str, Any]:
    said = common(config) | {
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": config["kv_lora_rank"],
        "attention.key_length": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
        "rope.dimension_count": config["qk_rope_head_dim"],
    }
    del said["attention.value_length"]
    return said


def describe_youtu(config: Config) -> dict[str, Any]:
    rotary, rank = config["qk_rope_head_dim"], config["kv_lora_rank"]
    return common(config) | {
        "attention.head_count_kv": 1,
        "leading_dense_block_count": config["num_hidden_layers"],
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rotary,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotary,
        "attention.value_length_mla": config["v_head_dim"],
        "expert_feed_forward_length": config["intermediate_size"],
        "expert_shared_count": 0,
        "rope.dimension_count": rotary,
    }


def modify_youtu(own: str, array: Array, config: Config) -> Tensors:
    if own.endswith("kv_b_proj.weight"):
        yield from halves_of_latents(own, array, config["num_attention_heads"], config)
        return
    yield own, array


def extra_exaone(stored: Mapping[str, Array], config: Config) -> Tensors:
    pairs = config["hidden_size"] // config["num_attention_heads"] // 2
    yield "rope_freqs.weight", llama3_divisors(config["rope_parameters"], pairs)


def describe_minicpm(config: Config) -> dict[str, Any]:
    return common(config) | {
        "embedding_scale": config["embedding_multiplier"],
        "residual_scale": config["residual_multiplier"],
        "logit_scale": config["logits_scaling"],
    }


def describe_orion(config: Config) -> dict[str, Any]:
    return common(config) | {"attention.layer_norm_epsilon": config["layer_norm_eps"]}


def modify_maincoder(own: str, array: Array, config: Config) -> Tensors:
    """The original has pairs side by side where Hunyuan has them half a head apart."""
    for part in ("query", "key"):
        if own.endswith(f"{part}_layernorm.weight"):
            array = array.reshape(2, -1).swapaxes(0, 1).reshape(-1)
    yield from side_by_side(own, array, config)


def describe_muse(config: Config) -> dict[str, Any]:
    return common(config) | {
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [
            kind == "sliding_attention" for kind in config["layer_types"]
        ],
        "final_logit_softcapping": config["final_logit_softcapping"],
        "logit_scale": config["output_multiplier"],
    }


def modify_muse(own: str, array: Array, config: Config) -> Tensors:
    """Of its text alone; norms within layers have 1 added, and heads a norm of their scale."""
    text = own.replace("model.language_model.", "model.")
    if not text.startswith(("model.layers.", "model.norm.", "model.embed_tokens.", "lm_head.")):
        return
    if text.endswith("layernorm.weight"):
        array = array + 1
    place = ".".join(["blk", *text.split(".")[2:3]])
    if text.endswith("self_attn.gate_proj.weight"):
        yield f"{place}.attn_gate.weight", array
        return
    if text.endswith("q_proj.weight"):
        head = config["head_dim"]
        yield f"{place}.attn_q_norm.weight", np.full(head, config["qk_scale_factor"])
        yield f"{place}.attn_k_norm.weight", np.ones(head)
    yield from side_by_side(text, array, config)
