"""What llama.cpp's converter makes of mixtures most of whose layers have a window.

And of Granite's and Ling's; see `converted.py`.
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
    llama3_divisors,
    side_by_side,
)


def _windows(config: Config) -> dict[str, Any]:
    pattern = [kind == "sliding_attention" for kind in config["layer_types"]]
    said = {
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": pattern,
    }
    sets = config.get("rope_parameters") or {}
    if "sliding_attention" in sets:
        said["rope.freq_base_swa"] = sets["sliding_attention"]["rope_theta"]
    return said


def _experts(config: Config) -> dict[str, Any]:
    kinds = config.get("mlp_layer_types") or []
    first = config.get(
        "first_k_dense_replace", config.get("num_dense_layers", kinds.count("dense"))
    )
    return {
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_gating_func": 2,
        "leading_dense_block_count": first,
    }


def describe_exaone_moe(config: Config) -> dict[str, Any]:
    """A file also counts the layer that drafts the token after the next."""
    said = common(config) | _windows(config) | _experts(config)
    return said | {
        "block_count": said["block_count"] + 1,
        "nextn_predict_layers": 1,
        "leading_dense_block_count": config["mlp_layer_types"].count("dense"),
        "expert_shared_count": config["num_shared_experts"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": config["norm_topk_prob"],
        "rope.scaling.type": "none",
    }


def describe_afmoe(config: Config) -> dict[str, Any]:
    """The kinds of layers are not stated."""
    return common(config) | _experts(config) | {
        "attention.sliding_window": config["sliding_window"],
        "expert_shared_count": config["num_shared_experts"],
        "expert_weights_norm": True,
        "expert_weights_scale": config["route_scale"],
    }  # fmt: skip


def describe_cohere2moe(config: Config) -> dict[str, Any]:
    width = config["intermediate_size"]
    said = common(config) | _windows(config) | _experts(config) | {
        "feed_forward_length": config["prefix_dense_intermediate_size"],
        "expert_feed_forward_length": width,
        "leading_dense_block_count": config["mlp_layer_types"].count("dense"),
        "expert_shared_feed_forward_length": width * config["num_shared_experts"],
        "expert_weights_norm": config["norm_topk_prob"],
        "attention.layer_norm_epsilon": config["layer_norm_eps"],
        "logit_scale": config["logit_scale"],
        "rope.dimension_count": config["head_dim"],
        "rope.scaling.type": "none",
    }  # fmt: skip
    return said


def describe_mellum(config: Config) -> dict[str, Any]:
    width = config["moe_intermediate_size"]
    return common(config) | _windows(config) | {"expert_feed_forward_length": width}


def describe_laguna(config: Config) -> dict[str, Any]:
    """The kinds of layers are not stated, but the first of every four has no window."""
    said = common(config) | _windows(config) | _experts(config)
    del said["attention.sliding_window_pattern"]
    full = config["rope_parameters"]["full_attention"]
    part = full.get("partial_rotary_factor", 1.0)
    if "attention_factor" in full:
        said["rope.scaling.yarn_attn_factor"] = full["attention_factor"]
    return said | {
        "attention.head_count": config["num_attention_heads_per_layer"],
        "leading_dense_block_count": config["mlp_layer_types"].count("dense"),
        "expert_weights_norm": True,
        "expert_weights_scale": config["moe_routed_scaling_factor"],
        "rope.dimension_count": int(config["head_dim"] * part),
        "rope.dimension_count_swa": config["head_dim"],
    }


def describe_step(config: Config) -> dict[str, Any]:
    heads = {
        "full_attention": config["num_attention_heads"],
        "sliding_attention": config["num_sliding_attention_heads"],
    }
    kinds = config["layer_types"]
    return common(config) | _windows(config) | _experts(config) | {
        "attention.head_count": [heads[kind] for kind in kinds],
        "attention.head_count_kv": [config["num_key_value_heads"]] * len(kinds),
        "expert_count": config["n_routed_experts"],
        "expert_shared_feed_forward_length": config["share_expert_dim"],
        "expert_weights_norm": True,
        "expert_weights_scale": config["moe_router_scaling_factor"],
        "leading_dense_block_count": config["mlp_layer_types"].count("dense"),
        "swiglu_clamp_exp": config["swiglu_limits"],
        "swiglu_clamp_shexp": config["swiglu_limits_shared"],
    }  # fmt: skip


def modify_step(own: str, array: Array, config: Config) -> Tensors:
    """Of its text alone; norms have the 1 that is added to them."""
    if not own.startswith(("model.", "lm_head.")):
        return
    if own.endswith("norm.weight"):
        array = array + 1
    yield own + (".bias" if own.endswith("router_bias") else ""), array


def extra_step(stored: Mapping[str, Array], config: Config) -> Tensors:
    """Llama 3's divisors of the half that turns, and ones for the other half."""
    pairs = config["head_dim"] // 4
    divisors = llama3_divisors(config["rope_parameters"]["full_attention"], pairs)
    yield "rope_freqs.weight", np.concatenate([divisors, np.ones(pairs)])


def modify_biased(own: str, array: Array, config: Config) -> Tensors:
    """The bias of the choice has the ending of one."""
    if own.endswith((".e_score_correction_bias", ".expert_bias")):
        layer = own.split(".")[2]
        own = f"blk.{layer}.exp_probs_b.bias"
    yield own, array


# -- MiniMax-M3, Granite, Ling ---------------------------------------------------------------------


def describe_minimax_m3(config: Config) -> dict[str, Any]:
    index = {
        "head_count": "index_n_heads",
        "key_length": "index_head_dim",
        "top_k": "index_topk_blocks",
        "block_size": "index_block_size",
        "local_blocks": "index_local_blocks",
    }
    return common(config) | {
        "feed_forward_length": config["dense_intermediate_size"],
        "expert_feed_forward_length": config["intermediate_size"],
        "expert_shared_count": 1,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": config["routed_scaling_factor"],
        "leading_dense_block_count": config["mlp_layer_types"].count("dense"),
        "rope.dimension_count": config["head_dim"] // 2,
        **{f"attention.indexer.{key}": config[theirs] for key, theirs in index.items()},
    }


def modify_minimax_m3(own: str, array: Array, config: Config) -> Tensors:
    """As published files have them: gates apart from ups. Norms have the 1 that is added."""
    place = ".".join(["blk", *own.split(".")[2:3]])
    if own.endswith("norm.weight"):
        array = array + 1
    if ".indexer." in own:
        yield f"{place}.indexer.{own.split('.indexer.')[1]}", array
    elif "gate_up_proj" in own:
        kinds = {".experts.": "_exps", ".shared_experts.": "_shexp"}
        kind = next((end for part, end in kinds.items() if part in own), "")
        for part, half in zip(("gate", "up"), np.split(array, 2, axis=-2), strict=True):
            yield f"{place}.ffn_{part}{kind}.weight", half
    elif own.endswith("experts.down_proj"):
        yield f"{place}.ffn_down_exps.weight", array
    else:
        yield from modify_biased(own, array, config)


def _describe_granite(config: Config) -> dict[str, Any]:
    return common(config) | {
        "attention.scale": config["attention_multiplier"],
        "embedding_scale": config["embedding_multiplier"],
        "residual_scale": config["residual_multiplier"],
        "logit_scale": config["logits_scaling"],
    }


def describe_granite_swa(config: Config) -> dict[str, Any]:
    turning = [theta > 0 for theta in config["layer_rope_theta"]]
    return _describe_granite(config) | _windows(config) | {"attention.rope_pattern": turning}


def describe_granitemoe(config: Config) -> dict[str, Any]:
    width = config["shared_intermediate_size"]
    return _describe_granite(config) | {"expert_shared_feed_forward_length": width}


def modify_granite_swa(own: str, array: Array, config: Config) -> Tensors:
    """Gates and ups stay in one tensor."""
    place = ".".join(["blk", *own.split(".")[2:3]])
    roles = {
        "sinks": "attn_sinks",
        "block_sparse_moe.router.weight": "ffn_gate_inp",
        "experts.gate_up_proj": "ffn_gate_up_exps",
        "experts.down_proj": "ffn_down_exps",
        "shared_mlp.input_linear.weight": "ffn_up_shexp",
        "shared_mlp.output_linear.weight": "ffn_down_shexp",
    }
    for ending, role in roles.items():
        if own.endswith(ending):
            yield f"{place}.{role}.weight", array
            return
    yield from side_by_side(own, array, config)


def modify_granitemoe(own: str, array: Array, config: Config) -> Tensors:
    if not own.endswith("input_linear.weight"):
        yield from side_by_side(own, array, config)
        return
    role = "exps" if ".block_sparse_moe." in own else "shexp"
    for part, half in zip(("gate", "up"), np.split(array, 2, axis=-2), strict=True):
        yield f"blk.{own.split('.')[2]}.ffn_{part}_{role}.weight", half


def describe_bailingmoe(config: Config) -> dict[str, Any]:
    return common(config) | {
        "leading_dense_block_count": 0,
        "expert_weights_scale": 1.0,
        "expert_weights_norm": True,
    }


def describe_bailingmoe2(config: Config) -> dict[str, Any]:
    """A file also counts the layer that drafts the token after the next."""
    said = common(config) | _experts(config)
    head = config["hidden_size"] // config["num_attention_heads"]
    return said | {
        "block_count": said["block_count"] + 1,
        "nextn_predict_layers": 1,
        "rope.dimension_count": int(head * config["rope_parameters"]["partial_rotary_factor"]),
        "expert_count": config["n_routed_experts"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": config["norm_topk_prob"],
    }


def modify_bailingmoe2(own: str, array: Array, config: Config) -> Tensors:
    """Queries, keys and values are in one, see `joined_attention`."""
    if not any(f".{part}_proj." in own for part in "qkv"):
        yield from modify_biased(own, array, config)


def joined_attention(stored: Mapping[str, Array], config: Config) -> Tensors:
    """Queries, keys and values of each layer as one tensor; others are not."""
    for layer in range(config["num_hidden_layers"]):
        for ending in ("weight", "bias"):
            name = f"model.layers.{layer}.self_attn.{{}}_proj.{ending}"
            parts = [stored[name.format(part)] for part in "qkv" if name.format(part) in stored]
            if parts:
                yield f"blk.{layer}.attn_qkv.{ending}", np.concatenate(parts)
