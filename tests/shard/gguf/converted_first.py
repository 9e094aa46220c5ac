"""What llama.cpp's converter makes of older models: their metadata, and their tensors.

Names are those of the `gguf` package; what else is changed is written here as the converter's
source has it. For newer models see `converted.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file

from tests.shard.gguf.cases_first import ARCHITECTURE, FAMILIES, LLAMA3
from tests.shard.gguf.files import gguf

KEYS = {
    "max_position_embeddings": "context_length",
    "n_positions": "context_length",
    "max_seq_len": "context_length",
    "hidden_size": "embedding_length",
    "n_embd": "embedding_length",
    "d_model": "embedding_length",
    "num_hidden_layers": "block_count",
    "n_layer": "block_count",
    "n_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "n_head": "attention.head_count",
    "n_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "norm_eps": "attention.layer_norm_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
    "clip_qkv": "attention.clamp_kqv",
    "use_parallel_residual": "use_parallel_residual",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_topk": "expert_used_count",
    "moe_num_experts": "expert_count",
    "moe_k": "expert_used_count",
    "moe_layer_start_index": "leading_dense_block_count",
    "moe_layer_interval": "interleave_moe_layer_step",
}
LATENT_KEYS = {
    "kv_lora_rank": "attention.kv_lora_rank",
    "q_lora_rank": "attention.q_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "routed_scaling_factor": "expert_weights_scale",
    "first_k_dense_replace": "leading_dense_block_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}


def metadata(name: str, config: dict[str, Any], case: str) -> dict[str, Any]:
    """Return a file's metadata: what config.json says, in llama.cpp's words."""
    said = {key: config[ours] for ours, key in KEYS.items() if config.get(ours) is not None}
    said.setdefault("feed_forward_length", 4 * said["embedding_length"])
    said.setdefault("context_length", said["embedding_length"])  # BLOOM's, at times
    if config.get("head_dim") is not None:
        said["attention.value_length"] = config["head_dim"]
    rope = config.get("rope_parameters") or {}
    part = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor")
    if part is not None:
        head = said["embedding_length"] // said["attention.head_count"]
        said["rope.dimension_count"] = int(head * part)
    if rope:
        said["rope.freq_base"] = rope.get("full_attention", rope)["rope_theta"]
    said |= attention_metadata(name, config, case) | state_metadata(name, config)
    said |= mixture_metadata(name, config)
    if name == "deepseek2":
        said |= latent_metadata(config, case)
    if name == "glm4moe":  # and a layer that drafts the token after the next
        said["block_count"] += 1
        said["nextn_predict_layers"] = 1
    if name == "gpt-oss" and rope["rope_type"] == "yarn":
        said |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }
    found = {f"{name}.{key}": value for key, value in said.items()}
    return found | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [str(token) for token in range(config["vocab_size"])],
    }


def attention_metadata(name: str, config: dict[str, Any], case: str) -> dict[str, Any]:
    """Return what is said of attention alone where config.json has other words for it."""
    if name == "falcon":
        newer = config["new_decoder_architecture"]
        return {"attention.head_count_kv": config["num_kv_heads"] if newer else 1}
    if name == "mpt":
        return {
            "attention.max_alibi_bias": float(config["attn_config"]["alibi_bias_max"]),
            "attention.layer_norm_epsilon": 1e-5,
        }
    if case in ("olmo3", "exaone4-windows"):
        kinds = config["layer_types"]
        pattern = [kind == "sliding_attention" for kind in kinds]
        return {"attention.sliding_window_pattern": pattern}
    return {}


def state_metadata(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return what is said of layers that keep a state, and of those beside them that attend."""
    if name in ("lfm2", "lfm2moe"):
        heads, kinds = config["num_key_value_heads"], config["layer_types"]
        return {
            "attention.layer_norm_rms_epsilon": config["norm_eps"],
            "attention.head_count_kv": [heads if kind != "conv" else 0 for kind in kinds],
            "shortconv.l_cache": config["conv_L_cache"],
        }
    if name == "granitehybrid":
        heads, kinds = config["num_key_value_heads"], config["layer_types"]
        return {
            "attention.head_count_kv": [
                heads if kind.startswith(("full", "att")) else 0 for kind in kinds
            ],
            "ssm.conv_kernel": config["mamba_d_conv"],
            "ssm.state_size": config["mamba_d_state"],
            "ssm.group_count": config["mamba_n_groups"],
            "ssm.inner_size": config["mamba_n_heads"] * config["mamba_d_head"],
            "ssm.time_step_rank": config["mamba_n_heads"],
            "rope.scaling.finetuned": False,
        }
    return {}


def mixture_metadata(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return what is said of experts where config.json has other words for it."""
    said: dict[str, Any] = {}
    if name in ("glm4moe", "dots1"):
        said |= {ours: config[theirs] for theirs, ours in LATENT_KEYS.items() if theirs in config}
        said["expert_weights_norm"] = config["norm_topk_prob"]
    if name in ("glm4moe", "dots1", "minimax-m2", "lfm2moe"):
        said["expert_gating_func"] = 2
    if name == "lfm2moe":
        said |= {
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "leading_dense_block_count": config["num_dense_layers"],
        }
    if name == "dbrx":
        attention, mixture = config["attn_config"], config["ffn_config"]
        said |= {
            "feed_forward_length": mixture["ffn_hidden_size"],
            "attention.head_count_kv": attention["kv_n_heads"],
            "attention.clamp_kqv": attention["clip_qkv"],
            "attention.layer_norm_epsilon": 1e-5,
            "rope.freq_base": attention["rope_theta"],
            "expert_count": mixture["moe_num_experts"],
            "expert_used_count": mixture["moe_top_k"],
        }
    return said


def latent_metadata(config: dict[str, Any], case: str) -> dict[str, Any]:
    """Return what is said of DeepSeek; files from before latents attended by themselves differ."""
    said = {key: config[ours] for ours, key in LATENT_KEYS.items() if config.get(ours) is not None}
    plain, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    if case == "deepseek2-old":
        lengths = {"key_length": plain + rope, "value_length": config["v_head_dim"]}
    else:
        lengths = {
            "head_count_kv": 1,
            "key_length": config["kv_lora_rank"] + rope,
            "value_length": config["kv_lora_rank"],
            "key_length_mla": plain + rope,
            "value_length_mla": config["v_head_dim"],
        }
    said |= {f"attention.{key}": value for key, value in lengths.items()}
    kinds = config.get("mlp_layer_types")
    if kinds:
        said["leading_dense_block_count"] = kinds.index("sparse")
    if config["model_type"] != "deepseek_v2":
        said |= {"expert_gating_func": 2, "expert_weights_norm": config["norm_topk_prob"]}
    scaling = config["rope_parameters"]
    if scaling["rope_type"] == "yarn":
        said |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": scaling["factor"],
            "rope.scaling.original_context_length": scaling["original_max_position_embeddings"],
            "rope.scaling.yarn_log_multiplier": 0.1 * scaling["mscale_all_dim"],
        }
    return said


PERMUTED = (
    "llama",
    "granite",
    "granitemoe",
    "granitehybrid",
    "olmo",
    "baichuan",
    "smollm3",
    "arcee",
)


def changed(
    role: str, array: np.ndarray, name: str, config: dict[str, Any], said: dict[str, Any]
) -> np.ndarray:
    """Return a tensor as llama.cpp's converter turns it."""
    heads = int(said[f"{name}.attention.head_count"])
    key_heads = said.get(f"{name}.attention.head_count_kv", heads)
    key_heads = max(key_heads) if isinstance(key_heads, list) else key_heads
    counts = {"attn_q": heads, "attn_k": key_heads}
    if name in PERMUTED and role in counts:
        halves = array.reshape(counts[role], 2, -1, *array.shape[1:])
        return halves.swapaxes(1, 2).reshape(array.shape)
    if name in ("gptneox", "bloom", "falcon") and role == "attn_qkv":
        groups = array.reshape(key_heads, heads // key_heads + 2, -1, *array.shape[1:])
        parts = groups[:, :-2], groups[:, -2], groups[:, -1]
        return np.concatenate([part.reshape(-1, *array.shape[1:]) for part in parts])
    if name == "gpt2" and array.ndim == 2 and role.startswith(("attn", "ffn")):
        return array.T
    if name.startswith("gemma") and role.endswith("_norm"):
        return array + 1
    flat = role in ("ffn_gate_inp_shexp", "exp_probs_b")
    if role in ("shortconv", "ssm_conv1d") and array.ndim == 3:
        return array[:, 0]
    if role in ("ssm_a", "ssm_d"):
        return (-np.exp(array) if role == "ssm_a" else array)[:, None]
    if role == "ssm_norm":
        return array.reshape(config["mamba_n_groups"], -1)
    return array.reshape(-1) if flat else array


def tensors(
    name: str, case: str, folder: Path, config: dict[str, Any], said: dict[str, Any]
) -> dict[str, np.ndarray]:
    """Return a model's tensors as llama.cpp's converter names, turns and stacks them."""
    (arch,) = (key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(arch, said[f"{name}.block_count"])
    found: dict[str, np.ndarray] = {}
    experts: dict[str, list[tuple[int, np.ndarray]]] = {}
    for own, tensor in load_file(folder / "model.safetensors").items():
        array = tensor.float().numpy()
        number = re.search(r"\.(?:experts|norms)\.(\d+)\.", own)
        whole = own if number is None else own.replace(number[0], ".experts.")
        if number is not None and ".norms." in own:  # of every head
            whole = own.replace(number[0], ".")
        whole = whole.replace("e_score_correction_bias", "e_score_correction.bias")
        if "kv_b_proj" in own and case != "deepseek2-old":
            heads, key = config["num_key_value_heads"], config["qk_nope_head_dim"]
            both = array.reshape(heads, -1, array.shape[-1])
            layer = own.split(".")[2]
            found[f"blk.{layer}.attn_k_b.weight"] = both[:, :key].swapaxes(1, 2)
            found[f"blk.{layer}.attn_v_b.weight"] = both[:, key:]
            continue
        if own.endswith("input_linear.weight"):
            gate, up = np.split(array, 2, axis=-2)
            layer = own.split(".")[2]
            kind = "_shexp" if config["num_local_experts"] else ""
            kind = "_exps" if "block_sparse_moe" in own else kind
            found[f"blk.{layer}.ffn_gate{kind}.weight"] = gate
            found[f"blk.{layer}.ffn_up{kind}.weight"] = up
            continue
        if case == "granitehybrid-dense" and own.endswith("shared_mlp.output_linear.weight"):
            found[f"blk.{own.split('.')[2]}.ffn_down.weight"] = array
            continue
        whole = whole.replace(".dt_bias", ".dt_proj.bias")
        if name in ("gpt-oss", "dbrx") and ".experts." in own:
            found |= stacked(own, array, config)
            continue
        if own.endswith(".sinks"):
            whole += ".weight"
        if name == "lfm2moe":
            whole = whole.replace(".expert_bias", ".expert_bias.bias")
            whole = whole.removeprefix("model.") if number else whole
        if name == "bitnet":  # as its converter's table has them
            whole = whole.replace(".attn_sub_norm", ".inner_attn_ln")
            whole = whole.replace(".ffn_sub_norm", ".ffn_layernorm")
        if name == "bloom":
            whole = whole.removeprefix("transformer.")
        theirs = names.get_name(whole, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, own
        role = theirs.split(".")[2] if theirs.startswith("blk") else theirs.split(".")[-2]
        if number is not None:
            experts.setdefault(theirs, []).append((int(number[1]), array))
        else:
            found[theirs] = changed(role, array, name, config, said)
            if name == "nemotron" and theirs.endswith("norm.weight"):
                found[theirs] += 1
    for theirs, parts in experts.items():
        found[theirs] = np.stack([array for _, array in sorted(parts, key=lambda part: part[0])])
    return found


def stacked(own: str, array: np.ndarray, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return what the converter makes of a tensor that holds all experts' matrices or biases."""
    layer = re.search(r"\.(\d+)\.", own)
    assert layer is not None
    place = f"blk.{layer[1]}.ffn_"
    if config["model_type"] == "dbrx":
        part = {"w1": "gate", "v1": "up", "w2": "down"}[own.rpartition(".")[2]]
        each = array.reshape(config["ffn_config"]["moe_num_experts"], -1, array.shape[-1])
        return {f"{place}{part}_exps.weight": each.swapaxes(1, 2) if part == "down" else each}
    ending = "bias" if own.endswith("_bias") else "weight"
    rows = array if ending == "bias" else array.swapaxes(1, 2)
    if "down_proj" in own:
        return {f"{place}down_exps.{ending}": rows}
    halves = {"gate": rows[:, ::2], "up": rows[:, 1::2]}
    return {f"{place}{part}_exps.{ending}": half for part, half in halves.items()}


def frequencies(head: int) -> np.ndarray:
    """Return what Llama 3's frequencies are divided by, as the converter has it."""
    original, factor = LLAMA3["original_max_position_embeddings"], LLAMA3["factor"]
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    turns = original / (2 * np.pi * LLAMA3["rope_theta"] ** (np.arange(0, head, 2) / head))
    smooth = (turns - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    return np.where(turns > high, 1, np.where(turns < low, factor, between))


def made(
    checkpoint: Callable[..., Path], case: str, **more: Any
) -> tuple[str, Path, dict[str, Any], dict[str, np.ndarray]]:
    """Return a case's architecture, checkpoint, and what its file says and holds."""
    family, changes = FAMILIES[case]
    name = ARCHITECTURE.get(case, case)
    source = checkpoint(family, **changes, **more)
    config = json.loads((source / "config.json").read_text())
    said = metadata(name, config, case)
    arrays = tensors(name, case, source, config, said)
    if name == "glm4moe":
        last = f"blk.{said[f'{name}.block_count'] - 1}"
        norm = np.ones(config["hidden_size"])
        arrays = {
            f"{last}.attn_norm.weight": norm, f"{last}.nextn.enorm.weight": norm
        } | arrays  # fmt: skip
    if case == "llama3":
        arrays["rope_freqs.weight"] = frequencies(config["head_dim"])
    return name, source, said, arrays
