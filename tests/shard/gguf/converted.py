"""What llama.cpp's converter makes of newer models: their metadata, and their tensors.

Names are those of the `gguf` package; what else is changed is written here as the converter's
source has it, architecture by architecture.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

gguf: Any = pytest.importorskip("gguf", reason="gguf is not installed")

Array = np.ndarray[Any, Any]
Config = Mapping[str, Any]
Tensors = Iterator[tuple[str, Array]]
Modify = Callable[[str, Array, Config], Tensors]
ENDINGS = (".weight", ".bias", ".scale")


def common(config: Config) -> dict[str, Any]:
    """Return what is written of every model."""
    sets: dict[str, Any] = config.get("rope_parameters") or {}
    rope: dict[str, Any] = sets.get("full_attention", sets)
    said = {
        "block_count": config["num_hidden_layers"],
        "context_length": config.get("max_position_embeddings") or config.get("model_max_length"),
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config.get("intermediate_size"),
        "attention.head_count": config.get("num_attention_heads"),
        "attention.head_count_kv": config.get("num_key_value_heads"),
        "rope.freq_base": rope.get("rope_theta"),
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps"),
        "expert_count": config.get("num_local_experts", config.get("num_experts")),
        "expert_used_count": config.get(
            "num_experts_per_tok", config.get("num_experts_per_token", config.get("top_k_experts"))
        ),
        "expert_group_count": config.get("n_group"),
        "expert_group_used_count": config.get("topk_group"),
        "attention.key_length": config.get("head_dim"),
        "attention.value_length": config.get("head_dim"),
    }
    if rope.get("rope_type") == "yarn":
        said |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": rope.get("beta_fast"),
            "rope.scaling.yarn_beta_slow": rope.get("beta_slow"),
        }
    return {key: value for key, value in said.items() if value is not None}


def convert(
    name: str, config: Config, stored: Mapping[str, Array]
) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return a file's metadata and tensors, of a checkpoint's config and tensors."""
    describe, modify = MODELS[name]
    said = describe(config)
    (arch,) = (key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(arch, said["block_count"])
    found: dict[str, Array] = {}
    for own, array in _stacked(stored):
        for renamed, content in modify(own, array, config):
            theirs = names.get_name(renamed, try_suffixes=ENDINGS) or renamed
            assert theirs.startswith(("blk.", "token", "output", "per_layer", "altup")), own
            found[theirs] = content
    return {f"{name}.{key}": value for key, value in said.items()}, found


def _stacked(stored: Mapping[str, Array]) -> Tensors:
    """Yield tensors, those of experts as one for all of a layer."""
    experts: dict[str, dict[int, Array]] = {}
    for own, array in stored.items():
        number = re.search(r"\.experts\.(\d+)\.", own)
        if number is None:
            yield own, array
        else:
            whole = own.replace(number[0], ".experts.")
            experts.setdefault(whole, {})[int(number[1])] = array
    for whole, parts in experts.items():
        yield whole, np.stack([parts[i] for i in range(len(parts))])


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
    """A file also counts the layer that guesses the token after the next."""
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
        yield from _halves_of_latents(own, array, config["num_key_value_heads"], config)
        return
    yield own, array


def _halves_of_latents(own: str, array: Array, heads: int, config: Config) -> Tensors:
    both = array.reshape(heads, -1, array.shape[-1])
    key, layer = config["qk_nope_head_dim"], own.split(".")[2]
    yield f"blk.{layer}.attn_k_b.weight", both[:, :key].swapaxes(1, 2)
    yield f"blk.{layer}.attn_v_b.weight", both[:, key:]


MODELS: dict[str, tuple[Callable[[Config], dict[str, Any]], Modify]] = {
    "qwen3next": (describe_qwen3next, modify_qwen3next),
    "qwen35": (describe_qwen35, modify_qwen35),
    "qwen35moe": (describe_qwen35, modify_qwen35),
    "kimi-linear": (describe_kimi, modify_kimi),
}
