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
import torch

gguf: Any = pytest.importorskip("gguf", reason="gguf is not installed")

Array = np.ndarray[Any, Any]
Config = Mapping[str, Any]
Tensors = Iterator[tuple[str, Array]]
Modify = Callable[[str, Array, Config], Tensors]
ENDINGS = (".weight", ".bias", ".scale")
OWN = ("blk.", "token", "output", "per_layer", "altup", "rope")  # how llama.cpp's names begin


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
            assert theirs.startswith(OWN), own
            found[theirs] = content
    extra = EXTRA.get(name)
    for renamed, content in extra(stored, config) if extra else ():
        found[names.get_name(renamed, try_suffixes=ENDINGS) or renamed] = content
    whole = {f"{name}.{key}": value for key, value in said.items()}
    if name == "apertus":
        whole |= xielu(stored, config["num_hidden_layers"])
    return whole, found


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


# -- Mistral 3 and 4, Llama 4, Apertus, MiMo -------------------------------------------------------


def describe_mistral3(config: Config) -> dict[str, Any]:
    rope = config["rope_parameters"]
    return common(config) | {
        "rope.dimension_count": config["head_dim"],
        "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
    }


def describe_mistral4(config: Config) -> dict[str, Any]:
    rope, rotary = config["rope_parameters"], config["qk_rope_head_dim"]
    return common(config) | {
        "attention.head_count_kv": 1,
        "leading_dense_block_count": config["first_k_dense_replace"],
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
        "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"],
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
        "attention.temperature_length": rope["original_max_position_embeddings"],
    }


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


def modify_mistral3(own: str, array: Array, config: Config) -> Tensors:
    """Rows of queries and keys that turn together lie side by side."""
    counts = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    for part, count in counts.items():
        if f".{part}." in own:
            halves = array.reshape(config[count], 2, -1, *array.shape[1:])
            array = halves.swapaxes(1, 2).reshape(array.shape)
    yield own, array


def modify_mistral4(own: str, array: Array, config: Config) -> Tensors:
    """Gates and ups of all experts stay in one tensor."""
    if own.endswith("kv_b_proj.weight"):
        yield from _halves_of_latents(own, array, config["num_attention_heads"], config)
        return
    yield own + ("" if own.endswith(".weight") else ".weight"), array


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


Extra = Callable[[Mapping[str, Array], Config], Tensors]
EXTRA: dict[str, Extra] = {"gemma3n": extra_gemma3n, "gemma4": extra_gemma4}
MODELS: dict[str, tuple[Callable[[Config], dict[str, Any]], Modify]] = {
    "qwen3next": (describe_qwen3next, modify_qwen3next),
    "qwen35": (describe_qwen35, modify_qwen35),
    "qwen35moe": (describe_qwen35, modify_qwen35),
    "kimi-linear": (describe_kimi, modify_kimi),
    "gemma3n": (describe_gemma3n, modify_gemma3n),
    "gemma4": (describe_gemma4, modify_gemma4),
    "falcon-h1": (describe_falcon_h1, modify_falcon_h1),
    "nemotron_h": (describe_nemotron_h, modify_nemotron_h),
    "nemotron_h_moe": (describe_nemotron_h, modify_nemotron_h),
    "jamba": (describe_jamba, modify_mamba1),
    "mamba": (describe_mamba, modify_mamba1),
    "mamba2": (describe_mamba2, modify_mamba2),
    "mistral3": (describe_mistral3, modify_mistral3),
    "mistral4": (describe_mistral4, modify_mistral4),
    "llama4": (describe_llama4, modify_llama4),
    "apertus": (common, modify_apertus),
    "mimo2": (describe_mimo2, modify_mimo2),
}
