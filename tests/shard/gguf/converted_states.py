"""What llama.cpp's converter makes of models that keep states; see `converted.py`."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from tests.shard.gguf.conversion import (
    Array,
    Config,
    Tensors,
    common,
    halves_of_latents,
    side_by_side,
)

# -- Qwen3-Next, Qwen 3.5 --------------------------------------------------------------------------


def describe_qwen3next(config: Config) -> dict[str, Any]:
    heads = config["linear_num_value_heads"]
    part = config["rope_parameters"]["partial_rotary_factor"]
    said = {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * config["linear_value_head_dim"],
        "full_attention_interval": config.get("full_attention_interval", 4),
        "rope.dimension_count": int(config["head_dim"] * part),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
    }
    return common(config) | {key: value for key, value in said.items() if value is not None}


def describe_qwen35(config: Config) -> dict[str, Any]:
    """A file also counts the layer that drafts the token after the next."""
    said = describe_qwen3next(config)
    return said | {
        "block_count": said["block_count"] + 1,
        "nextn_predict_layers": 1,
        "rope.dimension_sections": [11, 11, 10, 0],
    }


def modify_qwen3next(own: str, array: Array, config: Config) -> Tensors:
    if own.endswith("in_proj_qkvz.weight"):
        keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
        key = config["linear_key_head_dim"]
        own_values = values // keys * config["linear_value_head_dim"]
        groups = array.reshape(keys, -1, array.shape[-1])
        cuts = np.cumsum([key, key, own_values])
        query, key_rows, value, gate = (
            part.reshape(-1, array.shape[-1]) for part in np.split(groups, cuts, axis=1)
        )
        layer = own.split(".")[2]
        yield f"blk.{layer}.attn_qkv.weight", np.concatenate([query, key_rows, value])
        yield f"blk.{layer}.attn_gate.weight", gate
        return
    if own.endswith(".A_log"):
        array = -np.exp(array)
    elif own.endswith(".dt_bias"):
        own = own.replace(".dt_bias", ".dt_proj.bias")
    elif "conv1d" in own:
        array = array.squeeze()
    elif own.endswith("norm.weight") and not own.endswith("linear_attn.norm.weight"):
        array = array + 1
    if own.endswith("shared_expert_gate.weight"):
        array = array.reshape(-1)
    yield own, array


def modify_qwen35(own: str, array: Array, config: Config) -> Tensors:
    """Value heads take turns over the key heads, then as Qwen3-Next's."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    size = config["linear_value_head_dim"]

    def turns(part: Array, size: int) -> Array:
        rows = part.reshape(keys, values // keys, size, *part.shape[1:])
        return np.ascontiguousarray(rows.swapaxes(0, 1)).reshape(part.shape)

    first = 2 * keys * config["linear_key_head_dim"]
    if re.search(r"\.(in_proj_qkv|conv1d)\.", own):
        array = np.concatenate([array[:first], turns(array[first:], size)])
    elif ".in_proj_z." in own:
        array = turns(array, size)
    elif re.search(r"\.(in_proj_[ab]|A_log|dt_bias)", own):
        array = turns(array, 1)
    elif ".out_proj." in own:
        array = turns(array.T, size).T
    yield from modify_qwen3next(own, array, config)


# The `gguf` package does not name these yet for this architecture.
_BESIDE = {
    "mtp.fc.weight": "nextn.eh_proj.weight",
    "mtp.pre_fc_norm_embedding.weight": "nextn.enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "nextn.hnorm.weight",
    "mtp.norm.weight": "nextn.shared_head_norm.weight",
}


def modify_drafting_qwen35(own: str, array: Array, config: Config) -> Tensors:
    """Names of the layer that drafts go on from the model's, before anything else is changed."""
    last = config["num_hidden_layers"]
    if own in _BESIDE:
        yield f"blk.{last}.{_BESIDE[own]}", array + ("norm" in own)
    else:
        yield from modify_qwen35(
            own.replace("mtp.layers.0.", f"model.layers.{last}."), array, config
        )


# -- Kimi Linear -----------------------------------------------------------------------------------


def describe_kimi(config: Config) -> dict[str, Any]:
    kinds, rotary = config["layer_types"], config["qk_rope_head_dim"]
    said = common(config)
    del said["attention.value_length"]
    return said | {
        "attention.head_count_kv": [int(kind == "full_attention") for kind in kinds],
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "kda.head_dim": config["linear_head_dim"],
        "attention.kv_lora_rank": config["kv_lora_rank"],
        "rope.dimension_count": rotary,
        "attention.key_length": config["kv_lora_rank"] + rotary,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotary,
        "attention.value_length_mla": config["v_head_dim"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["num_shared_experts"],
        "leading_dense_block_count": 0,
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_group_count": config["num_expert_group"],
        "expert_group_used_count": config["topk_group"],
        "expert_gating_func": 2,
    }


def modify_kimi(own: str, array: Array, config: Config) -> Tensors:
    if "_conv1d." in own:
        array = array.reshape(1, array.shape[0], 1, -1)
    if own.endswith(".A_log"):
        array = -np.exp(array)
    if own.endswith(".dt_bias"):
        own = own.replace(".dt_bias", ".dt_proj.bias")
    if own.endswith("e_score_correction_bias"):
        own = own.replace("e_score_correction_bias", "e_score_correction.bias")
    if own.endswith("kv_b_proj.weight"):
        yield from halves_of_latents(own, array, config["num_key_value_heads"], config)
        return
    yield own, array


# -- Mamba's kinds ---------------------------------------------------------------------------------


def _describe_states(
    said: dict[str, Any], kernel: int, state: int, groups: int, inner: int, heads: int
) -> dict[str, Any]:
    return said | {
        "ssm.conv_kernel": kernel,
        "ssm.state_size": state,
        "ssm.group_count": groups,
        "ssm.inner_size": inner,
        "ssm.time_step_rank": heads,
    }


def describe_falcon_h1(config: Config) -> dict[str, Any]:
    numbers = ("mamba_d_conv", "mamba_d_state", "mamba_n_groups", "mamba_d_ssm", "mamba_n_heads")
    return _describe_states(common(config), *(config[number] for number in numbers))


def describe_bamba(config: Config) -> dict[str, Any]:
    """Nothing of it is scaled, which tells it from Granite's."""
    attending, heads = config["attn_layer_indices"], config["mamba_n_heads"]
    said = common(config) | {
        "attention.head_count_kv": [
            config["num_key_value_heads"] if i in attending else 0
            for i in range(config["num_hidden_layers"])
        ],
        "rope.dimension_count": config["hidden_size"] // config["num_attention_heads"] // 2,
        "rope.scaling.finetuned": True,
    }
    kernel, state, groups = (config[f"mamba_{key}"] for key in ("d_conv", "d_state", "n_groups"))
    return _describe_states(said, kernel, state, groups, heads * config["mamba_d_head"], heads)


def describe_nemotron_h(config: Config) -> dict[str, Any]:
    kinds, heads = config["layers_block_type"], config["mamba_num_heads"]
    moe = "moe" in kinds
    width = config["moe_intermediate_size"] if moe else config["intermediate_size"]
    feeds = "moe" if moe else "mlp"
    said = common({**config, "num_hidden_layers": len(kinds)}) | {
        "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
        "attention.head_count_kv": [
            config["num_key_value_heads"] if kind == "full_attention" else 0 for kind in kinds
        ],
        "feed_forward_length": [width if kind == feeds else 0 for kind in kinds],
    }
    if moe:
        said |= {
            "expert_feed_forward_length": width,
            "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
            "expert_count": config["n_routed_experts"],
            "expert_shared_count": 1,
            "expert_weights_norm": config["norm_topk_prob"],
            "expert_weights_scale": config["routed_scaling_factor"],
            "expert_group_count": config["n_group"],
        }
        if config["moe_latent_size"]:
            said["moe_latent_size"] = config["moe_latent_size"]
    else:
        for key in ("expert_used_count", "expert_group_count", "expert_group_used_count"):
            del said[key]
    inner = heads * config["mamba_head_dim"]
    kernel, state, groups = (config[key] for key in ("conv_kernel", "ssm_state_size", "n_groups"))
    return _describe_states(said, kernel, state, groups, inner, heads)


def describe_jamba(config: Config) -> dict[str, Any]:
    every, first = config["attn_layer_period"], config["attn_layer_offset"]
    layers, heads = range(config["num_hidden_layers"]), config["num_key_value_heads"]
    said = common(config) | {
        "attention.head_count_kv": [heads if i % every == first else 0 for i in layers]
    }
    inner = config["mamba_expand"] * config["hidden_size"]
    rank = config["mamba_dt_rank"]
    said = _describe_states(said, config["mamba_d_conv"], config["mamba_d_state"], 0, inner, rank)
    del said["ssm.group_count"]
    return said


def _describe_alone(config: Config) -> dict[str, Any]:
    return {
        "context_length": 1 << 20,
        "embedding_length": config["hidden_size"],
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "block_count": config["num_hidden_layers"],
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.state_size": config["state_size"],
        "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
    }


def describe_mamba(config: Config) -> dict[str, Any]:
    return _describe_alone(config) | {
        "ssm.inner_size": config["intermediate_size"],
        "ssm.time_step_rank": config["time_step_rank"],
        "ssm.dt_b_c_rms": config["model_type"] == "falcon_mamba",
    }


def describe_mamba2(config: Config) -> dict[str, Any]:
    return _describe_alone(config) | {
        "ssm.inner_size": config["num_heads"] * config["head_dim"],
        "ssm.time_step_rank": config["num_heads"],
        "ssm.group_count": config["n_groups"],
    }


def modify_mamba1(own: str, array: Array, config: Config) -> Tensors:
    """Jamba's experts are called as Qwen's."""
    if own.endswith(".A_log"):
        array = -np.exp(array)
    if "conv1d.weight" in own:
        array = array.squeeze()
    yield own.replace(".feed_forward.experts.", ".mlp.experts."), array


def modify_mamba2(own: str, array: Array, config: Config) -> Tensors:
    groups = config.get("n_groups", config.get("mamba_n_groups"))
    if own.endswith((".A_log", ".D")):
        array = array.reshape(-1, 1)
    if re.search(r"\.(mixer|mamba)\.norm\.", own):
        array = array.reshape(groups, -1)
    yield from modify_mamba1(own.replace(".dt_bias", ".dt_proj.bias"), array, config)


def modify_bamba(own: str, array: Array, config: Config) -> Tensors:
    for turned, content in side_by_side(own, array, config):
        yield from modify_mamba2(turned, content, config)


def modify_nemotron_h(own: str, array: Array, config: Config) -> Tensors:
    own = own.replace("mixer.dt_bias", "mixer.dt.bias")
    own = own.replace("e_score_correction_bias", "e_score_correction.bias")
    if ".mixer.experts." in own:
        own = own.replace("backbone.", "model.").replace(".mixer.", ".mlp.")
    yield from modify_mamba2(own, array, config)


def modify_falcon_h1(own: str, array: Array, config: Config) -> Tensors:
    """Weights are multiplied with all that the model scales."""
    gate, down = config["mlp_multipliers"]
    inner = config["attention_in_multiplier"]
    factors = {
        ".down_proj": down,
        ".gate_proj": gate,
        ".k_proj": config["key_multiplier"] * inner,
        ".q_proj": inner,
        ".v_proj": inner,
        ".o_proj": config["attention_out_multiplier"],
        ".out_proj": config["ssm_out_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    array = array * next((each for part, each in factors.items() if f"{part}." in own), 1.0)
    if ".in_proj." in own:
        width, state = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        rows = np.cumsum([width, width, state, state])
        scales = config["ssm_multipliers"]
        parts = zip(np.split(array, rows), scales, strict=True)
        array = np.concatenate([part * scale for part, scale in parts])
        array = array * config["ssm_in_multiplier"]
    yield from modify_mamba2(own, array, config)
