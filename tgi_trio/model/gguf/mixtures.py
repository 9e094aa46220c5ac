"""Mixtures with softmax routing: metadata in their families' terms."""

from __future__ import annotations

from tgi_trio.model.families.mixtures import GPT_OSS_ROTARY, SEPARATE_EXPERTS
from tgi_trio.model.gguf.files import GgufModel
from tgi_trio.model.gguf.stated import Values, expert_width, read_count, read_experts


def phimoe(model: GgufModel, values: Values) -> Values:
    return {
        "model_type": "phimoe",
        "lm_head_bias": "output.bias" in model.tensors,
        "sliding_window": model.get("attention.sliding_window", 0),
        "intermediate_size": expert_width(model),
    } | read_experts(model)


def qwen2moe(model: GgufModel, values: Values) -> Values:
    return {
        "model_type": "qwen2_moe",
        "moe_intermediate_size": expert_width(model),
        "shared_expert_intermediate_size": expert_width(model, "ffn_up_shexp"),
        "norm_topk_prob": False,
    } | read_experts(model)


def qwen3moe(model: GgufModel, values: Values) -> Values:
    width = {"moe_intermediate_size": expert_width(model)}
    return {"model_type": "qwen3_moe", "norm_topk_prob": True} | width | read_experts(model)


def qwen3vlmoe(model: GgufModel, values: Values) -> Values:
    """Qwen3-VL's mixtures, whose checkpoints have a layer's experts in one tensor."""
    return qwen3moe(model, values) | {SEPARATE_EXPERTS: True}


def olmoe(model: GgufModel, values: Values) -> Values:
    width = {"intermediate_size": expert_width(model)}
    return {"model_type": "olmoe", "norm_topk_prob": False} | width | read_experts(model)


def gpt_oss(model: GgufModel, values: Values) -> Values:
    """gpt-oss; of its rotary scaling the file states only factor and length."""
    scaling = {} if "rope_scaling" not in values else GPT_OSS_ROTARY | values["rope_scaling"]
    return {
        "model_type": "gpt_oss",
        SEPARATE_EXPERTS: True,
        "intermediate_size": expert_width(model),
        "sliding_window": model.get("attention.sliding_window", 128),
        "rope_scaling": scaling or {"rope_type": "default"},
    } | read_experts(model)


def dbrx(model: GgufModel, values: Values) -> Values:
    experts = read_experts(model)
    return {
        "model_type": "dbrx",
        SEPARATE_EXPERTS: True,
        "d_model": values["hidden_size"],
        "n_heads": values["num_attention_heads"],
        "n_layers": values["num_hidden_layers"],
        "max_seq_len": values["max_position_embeddings"],
        "attn_config": {
            "kv_n_heads": read_count(model, "attention.head_count_kv"),
            "clip_qkv": model.get("attention.clamp_kqv"),
            "rope_theta": values.get("rope_theta", 10000.0),
        },
        "ffn_config": {
            "ffn_hidden_size": expert_width(model),
            "moe_num_experts": experts["num_experts"],
            "moe_top_k": experts["num_experts_per_tok"],
        },
    }
