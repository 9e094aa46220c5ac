"""What llama.cpp's converter makes of newer models of attention alone; see `converted.py`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tests.shard.gguf.conversion import Array, Config, Tensors, common, halves_of_latents

# -- Gemma 3n and 4 --------------------------------------------------------------------------------


def _describe_gemma(config: Config) -> dict[str, Any]:
    rope = config["rope_parameters"]
    said = common(config) | {
        "rope.freq_base_swa": rope["sliding_attention"]["rope_theta"],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [
            kind == "sliding_attention" for kind in config["layer_types"]
        ],
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"] or 0,
    }
    if config.get("final_logit_softcapping"):
        said["final_logit_softcapping"] = config["final_logit_softcapping"]
    return said


def describe_gemma3n(config: Config) -> dict[str, Any]:
    normal = torch.distributions.Normal(0.0, 1.0)
    pattern = torch.tensor(config["activation_sparsity_pattern"])
    return _describe_gemma(config) | {
        "altup.active_idx": config["altup_active_idx"],
        "altup.num_inputs": config["altup_num_inputs"],
        "activation_sparsity_scale": normal.icdf(pattern).tolist(),
    }


def _wide(config: Config) -> dict[str, Any]:
    """Return what heads of layers without a window have of their own."""
    own: dict[str, dict[str, Any]] = config.get("per_layer_config") or {}
    return next(iter(own.values()), {})


def describe_gemma4(config: Config) -> dict[str, Any]:
    kinds, narrow = config["layer_types"], config["head_dim"]
    whole = _wide(config)
    wide, heads = whole.get("head_dim", narrow), config["num_key_value_heads"]
    said = _describe_gemma(config) | {
        "attention.key_length": wide,
        "attention.value_length": wide,
        "attention.key_length_swa": narrow,
        "attention.value_length_swa": narrow,
        "rope.dimension_count": wide,
        "rope.dimension_count_swa": narrow,
    }
    if "num_key_value_heads" in whole:
        said["attention.head_count_kv"] = [
            heads if kind == "sliding_attention" else whole["num_key_value_heads"] for kind in kinds
        ]
    if config["moe_intermediate_size"]:
        said["expert_feed_forward_length"] = config["moe_intermediate_size"]
    if config["use_double_wide_mlp"]:
        width, shared = config["intermediate_size"], config["num_kv_shared_layers"]
        said["feed_forward_length"] = [width] * (len(kinds) - shared) + [2 * width] * shared
    return said


def modify_gemma3n(own: str, array: Array, config: Config) -> Tensors:
    """The projections of streams lie in one tensor, see `extra_gemma3n`."""
    if "altup_projections" not in own and "altup_unembed_projections" not in own:
        yield own + (".weight" if own.endswith("_scale") else ""), array


def extra_gemma3n(stored: Mapping[str, Array], config: Config) -> Tensors:
    for kind in ("altup_projections", "altup_unembed_projections"):
        parts = [stored[f"model.{kind}.{i}.weight"] for i in range(config["altup_num_inputs"] - 1)]
        yield f"model.{kind}.weight", np.stack(parts)


def modify_gemma4(own: str, array: Array, config: Config) -> Tensors:
    place = ".".join(["blk", *own.split(".")[2:3]])
    if own.endswith("router.scale"):
        yield f"{place}.ffn_gate_inp.scale", array
    elif own.endswith("per_expert_scale"):
        yield f"{place}.ffn_down_exps.scale", array
    else:
        bare = own.endswith("layer_scalar") or ".experts." in own
        yield own + (".weight" if bare else ""), array


def extra_gemma4(stored: Mapping[str, Array], config: Config) -> Tensors:
    """Pairs that do not turn are told by frequencies of nearly nothing."""
    whole = _wide(config)
    pairs = (whole or config)["head_dim"] // 2
    part = config["rope_parameters"]["full_attention"]["partial_rotary_factor"]
    turned = int(pairs * part)
    yield "rope_freqs.weight", np.array([1.0] * turned + [1e30] * (pairs - turned))


# -- Mistral 3 and 4, DeepSeek V3.2, GLM, Hunyuan 3, Llama 4, Apertus, MiMo -----------------------


def describe_mistral3(config: Config) -> dict[str, Any]:
    rope = config["rope_parameters"]
    return common(config) | {
        "rope.dimension_count": config["head_dim"],
        "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
    }


def _describe_latents(config: Config) -> dict[str, Any]:
    rotary = config["qk_rope_head_dim"]
    said = {
        "attention.head_count_kv": 1,
        "leading_dense_block_count": config.get("first_k_dense_replace", 0),
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": config["kv_lora_rank"],
        "attention.key_length": config["kv_lora_rank"] + rotary,
        "attention.value_length": config["kv_lora_rank"],
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotary,
        "attention.value_length_mla": config["v_head_dim"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_count": config["n_routed_experts"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": config["norm_topk_prob"],
        "rope.dimension_count": rotary,
    }
    return common(config) | said


def describe_mistral4(config: Config) -> dict[str, Any]:
    rope = config["rope_parameters"]
    return _describe_latents(config) | {
        "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"],
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
        "attention.temperature_length": rope["original_max_position_embeddings"],
    }


def describe_deepseek32(config: Config) -> dict[str, Any]:
    """A file also counts the layer that drafts the token after the next."""
    said = _describe_latents(config)
    dense = config["mlp_layer_types"].count("dense") if "mlp_layer_types" in config else None
    return said | ({} if dense is None else {"leading_dense_block_count": dense}) | {
        "block_count": said["block_count"] + 1,
        "nextn_predict_layers": 1,
        "expert_gating_func": 2,
        "attention.indexer.head_count": config["index_n_heads"],
        "attention.indexer.key_length": config["index_head_dim"],
        "attention.indexer.top_k": config["index_topk"],
    }  # fmt: skip


def describe_glm_dsa(config: Config) -> dict[str, Any]:
    types = [kind == "full" for kind in config["indexer_types"]]
    return describe_deepseek32(config) | {"attention.indexer.types": types}


def describe_llama4(config: Config) -> dict[str, Any]:
    return common(config) | {
        "feed_forward_length": config["intermediate_size_mlp"],
        "expert_feed_forward_length": config["intermediate_size"],
        "interleave_moe_layer_step": config["interleave_moe_layer_step"],
        "rope.dimension_count": config["head_dim"],
    }


def describe_mimo2(config: Config) -> dict[str, Any]:
    rope, heads = config["rope_parameters"], config["num_key_value_heads"]
    windowed = [int(kind == "sliding_attention") for kind in config["layer_types"]]
    return common(config) | {
        "attention.head_count_kv": [2 * heads if each else heads for each in windowed],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": windowed,
        "attention.value_length": config["v_head_dim"],
        "attention.value_scale": config["attention_value_scale"],
        "expert_count": config["n_routed_experts"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_gating_func": 2,
        "rope.freq_base_swa": rope["sliding_attention"]["rope_theta"],
        "rope.dimension_count": int(
            config["head_dim"] * rope["full_attention"]["partial_rotary_factor"]
        ),
    }


def describe_hy_v3(config: Config) -> dict[str, Any]:
    """A file also counts the layer that drafts the token after the next."""
    said = common(config)
    return said | {
        "block_count": said["block_count"] + 1,
        "nextn_predict_layers": 1,
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_feed_forward_length": config["moe_intermediate_size"]
        * config["num_shared_experts"],
        "expert_weights_norm": True,
        "expert_weights_scale": config["router_scaling_factor"],
        "expert_gating_func": 2,
    }


def describe_glm4v(config: Config) -> dict[str, Any]:
    """A model that sees: positions have three parts. As GLM-OCR, with a layer that drafts."""
    said = common(config)
    return said | {
        "block_count": said["block_count"] + 1,
        "nextn_predict_layers": 1,
        "rope.dimension_count": config["head_dim"] // 2,
        "rope.dimension_sections": [2, 1, 1, 0],
    }


def modify_mistral4(own: str, array: Array, config: Config) -> Tensors:
    """Gates and ups of all experts stay in one tensor."""
    if own.endswith("kv_b_proj.weight"):
        yield from halves_of_latents(own, array, config["num_attention_heads"], config)
        return
    yield own + ("" if own.endswith(".weight") else ".weight"), array


def modify_deepseek32(own: str, array: Array, config: Config) -> Tensors:
    own = own.replace("e_score_correction_bias", "e_score_correction.bias")
    if own.endswith("kv_b_proj.weight"):
        yield from halves_of_latents(own, array, config["num_attention_heads"], config)
        return
    yield own, array


def modify_glm4v(own: str, array: Array, config: Config) -> Tensors:
    """Pairs that turn lie half of what turns apart, not side by side as in the checkpoint."""
    if re.search(r"\.[qk]_proj\.", own):
        heads = array.reshape(-1, config["head_dim"], *array.shape[1:])
        turned = config["head_dim"] // 2
        parts = heads[:, :turned:2], heads[:, 1:turned:2], heads[:, turned:]
        array = np.concatenate(parts, axis=1).reshape(array.shape)
    yield own, array


def modify_plain(own: str, array: Array, config: Config) -> Tensors:
    yield own, array


def modify_llama4(own: str, array: Array, config: Config) -> Tensors:
    if own.endswith("gate_up_proj"):
        halves = np.split(array.swapaxes(1, 2), 2, axis=1)
        for part, half in zip(("gate", "up"), halves, strict=True):
            yield own.replace("gate_up_proj", f"{part}_proj.weight"), half
        return
    if own.endswith("experts.down_proj"):
        own, array = f"{own}.weight", array.swapaxes(1, 2)
    yield own, array


def modify_apertus(own: str, array: Array, config: Config) -> Tensors:
    """The activation's numbers are metadata, see `xielu`."""
    if ".act_fn." not in own:
        yield own, array


def xielu(stored: Mapping[str, Array], layers: int) -> dict[str, list[float]]:
    """Return what is said of Apertus' activations, in keys without an architecture."""
    return {
        f"xielu.{number}": [
            float(stored[f"model.layers.{i}.mlp.act_fn.{number}"].item()) for i in range(layers)
        ]
        for number in ("alpha_p", "alpha_n", "beta", "eps")
    }


def modify_mimo2(own: str, array: Array, config: Config) -> Tensors:
    own = own.replace("e_score_correction_bias", "e_score_correction.bias")
    yield own + (".weight" if own.endswith("sink_bias") else ""), array
