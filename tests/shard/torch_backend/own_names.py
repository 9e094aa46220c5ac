"""Checkpoints of families that transformers has not, made of those of relatives that it has.

A relative's tiny checkpoint, with the names and the packing that the family's published files have:
what transformers says of the one is right for the other.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]
Checkpoint = Callable[..., Path]


def _alike(config: Config) -> Config:
    return config


@dataclass(frozen=True, slots=True)
class Case:
    """How a family's checkpoint is made of a relative's."""

    relative: str  # a type of transformers
    changes: Config = field(default_factory=dict)  # of the relative's tiny configuration
    config: Callable[[Config], Config] = _alike  # the relative's config.json -> this family's
    pack: Callable[[Tensors, Config], Tensors] = lambda tensors, config: tensors
    names: Mapping[str, str] = field(default_factory=dict)  # patterns in names -> what replaces
    # what the relative's tensors are, for the same model
    oracle: Callable[[Tensors], Tensors] = _alike


def make_case(name: str, checkpoint: Checkpoint, folder: Path) -> tuple[Path, Path]:
    """Return the relative's checkpoint and that of the family, both written below `folder`."""
    case = CASES[name]
    made = checkpoint(case.relative, **{"hidden_size": 128, **case.changes})
    relative, own = (Path(shutil.copytree(made, folder / part)) for part in ("relative", "own"))
    tensors = case.oracle(load_file(relative / "model.safetensors"))
    save_file(tensors, relative / "model.safetensors", {"format": "pt"})
    said = json.loads((relative / "config.json").read_text())
    tensors = case.pack(tensors, said)
    for found, replacement in case.names.items():
        tensors = {re.sub(found, replacement, key): value for key, value in tensors.items()}
    save_file(tensors, own / "model.safetensors", {"format": "pt"})
    said = case.config(dict(said)) | {"model_type": name.partition(" ")[0]}
    (own / "config.json").write_text(json.dumps(said))
    return relative, own


# --- packing --------------------------------------------------------------------------------------


def _stacked(place: str, packed: str) -> Callable[[Tensors, Config], Tensors]:
    """Return a function that joins queries, keys and values of each layer, one after another."""

    def pack(tensors: Tensors, config: Config) -> Tensors:
        found, further = dict(tensors), config.get("num_nextn_predict_layers", 0)
        for index in range(config["num_hidden_layers"] + further):
            layer = f"model.layers.{index}."
            for end in ("weight", "bias"):
                names = [f"{layer}{place}{letter}_proj.{end}" for letter in "qkv"]
                if names[0] in found:
                    found[f"{layer}{packed}.{end}"] = torch.cat([found.pop(key) for key in names])
        return found

    return pack


def _grouped(tensors: Tensors, config: Config) -> Tensors:
    """Join for each KV head its queries, its key and its value, as InternLM 2 does."""
    found, kv_heads = dict(tensors), config["num_key_value_heads"]
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        for end in ("weight", "bias"):
            names = [f"{layer}self_attn.{letter}_proj.{end}" for letter in "qkv"]
            if names[0] in found:
                parts = [found.pop(key).unflatten(0, (kv_heads, -1)) for key in names]
                found[f"{layer}attention.wqkv.{end}"] = torch.cat(parts, dim=1).flatten(0, 1)
    return found


def _per_head(tensors: Tensors, config: Config) -> Tensors:
    """Join for each head its query, its key and its value: ChatGLM's, if no heads are shared."""
    packed = _grouped(tensors, config)
    return {key.replace("attention.wqkv", _CHATGLM_QKV): part for key, part in packed.items()}


def _without_gate(tensors: Tensors) -> Tensors:
    """Half of what Qwen 2's shared expert says counts, whatever the token."""
    return {
        name: torch.zeros_like(part) if "shared_expert_gate" in name else part
        for name, part in tensors.items()
    }


def _half_shared(tensors: Tensors, config: Config) -> Tensors:
    return {
        name: part / 2 if "shared_expert.down_proj" in name else part
        for name, part in tensors.items()
        if "shared_expert_gate" not in name
    }


def _half_shared_and_stacked(tensors: Tensors, config: Config) -> Tensors:
    return _LING_QKV(_half_shared(tensors, config), config)


def _apart(tensors: Tensors, config: Config) -> Tensors:
    """Return tensors in memory of their own, for files that have one of several names."""
    return {name: part.clone() for name, part in tensors.items()}


# --- config.json ----------------------------------------------------------------------------------


def _internlm2(config: Config) -> Config:
    rope = config.pop("rope_parameters")
    theta, kind = rope["rope_theta"], rope.get("rope_type", "default")
    scaling = None if kind == "default" else {"type": kind, "factor": rope["factor"]}
    del config["head_dim"]
    bias = config.pop("attention_bias")
    return config | {"rope_theta": theta, "rope_scaling": scaling, "bias": bias}


def _internlm(config: Config) -> Config:
    theta = config.pop("rope_parameters")["rope_theta"]
    turning = {"rotary": {"base": theta, "type": "dynamic"}}
    return config | turning | {"bias": config.pop("attention_bias")}


def _pangu(config: Config) -> Config:
    theta = config.pop("rope_parameters")["rope_theta"]
    return config | {"rope_theta": theta, "bias": config.pop("attention_bias")}


def _orion(config: Config) -> Config:
    return config | {"rms_norm_eps": config.pop("layer_norm_eps")}


def _chatglm(config: Config) -> Config:
    rope = config.pop("rope_parameters")
    assert rope["rope_theta"] == 20000.0 and rope["partial_rotary_factor"] == 0.5
    shared = config["num_key_value_heads"] != config["num_attention_heads"]
    kept = ("architectures", "hidden_size", "num_attention_heads", "eos_token_id", "torch_dtype")
    return {name: config[name] for name in kept if name in config} | {
        "num_layers": config["num_hidden_layers"],
        "padded_vocab_size": config["vocab_size"],
        "vocab_size": 3,  # which counts for nothing
        "ffn_hidden_size": config["intermediate_size"],
        "kv_channels": config["head_dim"],
        "seq_length": config["max_position_embeddings"],
        "layernorm_epsilon": config["rms_norm_eps"],
        "multi_query_attention": shared,
        "multi_query_group_num": config["num_key_value_heads"] if shared else 1,
        "add_qkv_bias": config["attention_bias"],
        "add_bias_linear": False,
        "rmsnorm": True,
        "post_layer_norm": True,
        "apply_residual_connection_post_layernorm": False,
        "original_rope": True,
        "rope_ratio": 2,
        "tie_word_embeddings": False,
    }


def _minicpm(config: Config) -> Config:
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    scales = {
        "scale_emb": config.pop("embedding_multiplier"),
        "scale_depth": config.pop("residual_multiplier") * layers**0.5,
        "dim_model_base": hidden / config.pop("logits_scaling"),
    }
    assert config.pop("attention_multiplier") == 32**-0.5
    return config | scales


def _minicpm4(config: Config) -> Config:
    """Of 512 tokens, of which it was trained with 128: the long divisors count at any length."""
    rope = config.pop("rope_parameters")
    rope = {"rope_type": "longrope", "long_factor": rope["long_factor"]} | {
        "short_factor": [1.0] * len(rope["long_factor"]),
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
    }
    return _minicpm(config) | {"rope_theta": 10000.0, "rope_scaling": rope, "mup_denominator": 32}


def _deepseek(config: Config) -> Config:
    del config["shared_expert_intermediate_size"], config["qkv_bias"]
    return config | {
        "n_routed_experts": config.pop("num_experts"),
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
    }


def _ling(config: Config) -> Config:
    del config["shared_expert_intermediate_size"], config["qkv_bias"]
    return config | {
        "architectures": ["BailingMoeForCausalLM"],
        "num_shared_experts": 2,
        "first_k_dense_replace": 0,
        "use_bias": False,
        "use_qkv_bias": False,
        "norm_head": False,
    }


def _ling2(config: Config) -> Config:
    rope = config.pop("rope_parameters")
    assert rope.get("partial_rotary_factor") == 0.5
    return config | {
        "architectures": ["BailingMoeV2ForCausalLM"],
        "num_experts": config.pop("n_routed_experts"),
        "num_shared_experts": config.pop("n_shared_experts"),
        "use_qkv_bias": config.pop("attention_bias"),
        "use_bias": False,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "rope_theta": rope["rope_theta"],
        "partial_rotary_factor": 0.5,
    }


def _ling_1t(config: Config) -> Config:
    """Which says how much of a head turns by its width."""
    config = _ling2(config)
    width = int(config["head_dim"] * config.pop("partial_rotary_factor"))
    return config | {"rotary_dim": width}


_CHATGLM_QKV = "self_attention.query_key_value"
_CHATGLM = {
    r"^model\.embed_tokens": "transformer.embedding.word_embeddings",
    r"^model\.norm": "transformer.encoder.final_layernorm",
    r"^lm_head": "transformer.output_layer",
    r"^model\.layers": "transformer.encoder.layers",
    r"self_attn\.o_proj": "self_attention.dense",
    r"mlp\.gate_up_proj": "mlp.dense_h_to_4h",
    r"mlp\.down_proj": "mlp.dense_4h_to_h",
}
_GLM: Config = {
    "head_dim": 32,
    "attention_bias": True,
    "rope_parameters": {
        **{"rope_type": "default", "rope_theta": 20000.0, "partial_rotary_factor": 0.5}
    },
}
_BIASED: Config = {
    "attention_bias": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
}
_INTERNLM2 = {
    r"^model\.embed_tokens": "model.tok_embeddings",
    r"^lm_head": "output",
    r"self_attn\.o_proj": "attention.wo",
    r"input_layernorm": "attention_norm",
    r"post_attention_layernorm": "ffn_norm",
    r"mlp\.gate_proj": "feed_forward.w1",
    r"mlp\.up_proj": "feed_forward.w3",
    r"mlp\.down_proj": "feed_forward.w2",
}
_LING_QKV = _stacked("self_attn.", "attention.query_key_value")
_LING = {
    r"^model\.embed_tokens": "model.word_embeddings",
    r"self_attn\.o_proj": "attention.dense",
    r"self_attn\.q_norm": "attention.query_layernorm",
    r"self_attn\.k_norm": "attention.key_layernorm",
    r"e_score_correction_bias": "expert_bias",
    r"mlp\.shared_expert\.": "mlp.shared_experts.",
    r"shared_head\.norm": "final_layernorm",
}
_SHARED = {r"mlp\.shared_expert\.": "mlp.shared_experts."}
_GRANITE: Config = {
    "attention_multiplier": 32**-0.5,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 1.4 / 2**0.5,
    "logits_scaling": 2.0,
}
_LONG: Config = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 128,
    **{key: [1.0 + 0.2 * i for i in range(16)] for key in ("short_factor", "long_factor")},
}
_QWEN2_MOE: Config = {
    "qkv_bias": False,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 128,
    "num_hidden_layers": 2,
}
_GLM4_MOE: Config = {
    "head_dim": 32,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_hidden_layers": 3,
}
# Names are types of config.json, and what tells cases of one apart.
CASES: dict[str, Case] = {
    "internlm": Case("llama", _BIASED | {"num_key_value_heads": 4}, _internlm),
    "PanguEmbedded": Case("llama", _BIASED, _pangu),
    "internlm2": Case("llama", {}, _internlm2, _grouped, _INTERNLM2),
    "internlm2 with biases": Case(
        "llama", {"attention_bias": True}, _internlm2, _grouped, _INTERNLM2
    ),
    "xverse": Case("llama", {"num_key_value_heads": 4}),
    "aquila": Case("llama"),
    "orion": Case("stablelm", {"partial_rotary_factor": 1.0, "use_qkv_bias": False}, _orion),
    "chatglm": Case("glm", _GLM, _chatglm, _stacked("self_attn.", _CHATGLM_QKV), _CHATGLM),
    "chatglm of heads alone": Case(
        "glm", _GLM | {"num_key_value_heads": 4}, _chatglm, _per_head, _CHATGLM
    ),
    "minicpm": Case("granite", _GRANITE | {"tie_word_embeddings": True}, _minicpm),
    "minicpm 4": Case("granite", _GRANITE | {"rope_parameters": _LONG}, _minicpm4),
    "deepseek": Case(
        "qwen2_moe",
        _QWEN2_MOE | {"norm_topk_prob": False, "mlp_only_layers": [0]},
        _deepseek,
        _half_shared,
        _SHARED,
        _without_gate,
    ),
    "bailing_moe": Case(
        "qwen2_moe",
        _QWEN2_MOE | {"norm_topk_prob": True, "mlp_only_layers": []},
        _ling,
        _half_shared_and_stacked,
        _LING,
        _without_gate,
    ),
    "bailing_moe of version 2": Case("glm4_moe", _GLM4_MOE, _ling2, _LING_QKV, _LING),
    "bailing_moe_v2": Case("glm4_moe", _GLM4_MOE, _ling_1t, _LING_QKV, _LING),
    "kimi_k2": Case("deepseek_v3", {}, pack=_apart),
}
