"""Qwen3-Next, Qwen 3.5 and Kimi Linear: a delta rule in layers without attention.

llama.cpp splits Qwen3-Next's queries, keys, values and gates into separate matrices, and tiles Qwen
3.5's value heads over the key heads; keys in the config pass this to the families.
"""

from __future__ import annotations

from typing import Final

from tgi_trio.model.families.linear_attention import VALUE_HEADS_TILED
from tgi_trio.model.families.llama_like import SEPARATE_PROJECTIONS
from tgi_trio.model.gguf.files import GgufModel
from tgi_trio.model.gguf.stated import (
    Values,
    expert_width,
    has_tensor,
    read_by_layer,
    read_count,
    read_experts,
    read_first_sparse,
    read_number,
    read_own_layers,
)

_SIGMOID: Final = 2  # of `expert_gating_func`
_USUAL_INTERVAL: Final = 4  # every n-th layer has attention, in files that do not state it
_STATE: Final = {
    "ssm_conv1d": "conv1d",
    "ssm_dt.bias": "dt_bias",
    "ssm_a": "A_log",
    "ssm_norm": "norm",
    "ssm_out": "out_proj",
}
QWEN3_NEXT: Final = _STATE | {
    "attn_qkv": "in_proj_qkv",
    "attn_gate": "in_proj_z",
    "ssm_in": "in_proj_qkvz",  # in older files, all of them in one
    "ssm_ba": "in_proj_ba",
}
QWEN35: Final = _STATE | {
    "attn_qkv": "in_proj_qkv",
    "attn_gate": "in_proj_z",
    "ssm_beta": "in_proj_b",
    "ssm_alpha": "in_proj_a",
}
KIMI: Final = {
    "attn_q": "q_proj",
    "attn_k": "k_proj",
    "attn_v": "v_proj",
    "attn_output": "o_proj",
    "ssm_conv1d_q": "q_conv1d",
    "ssm_conv1d_k": "k_conv1d",
    "ssm_conv1d_v": "v_conv1d",
    "ssm_f_a": "f_a_proj",
    "ssm_f_b": "f_b_proj",
    "ssm_g_a": "g_a_proj",
    "ssm_g_b": "g_b_proj",
    "ssm_beta": "b_proj",
    "ssm_a": "A_log",
    "ssm_dt.bias": "dt_bias",
    "ssm_norm": "o_norm",
}


def qwen3next(model: GgufModel, values: Values) -> Values:
    separate = not has_tensor(model, "ssm_in.weight")
    return {
        "model_type": "qwen3_next",
        SEPARATE_PROJECTIONS: separate,
    } | _qwen(model, values) | _mixture(model)  # fmt: skip


def qwen35(model: GgufModel, values: Values) -> Values:
    """The dense Qwen 3.5 and 3.6."""
    return {"model_type": "qwen3_5_text", VALUE_HEADS_TILED: True} | _qwen(model, values)


def qwen35moe(model: GgufModel, values: Values) -> Values:
    config = {"model_type": "qwen3_5_moe_text", VALUE_HEADS_TILED: True}
    return config | _qwen(model, values) | _mixture(model)


def _qwen(model: GgufModel, values: Values) -> Values:
    layers = read_own_layers(model, values)
    keys, heads = read_count(model, "ssm.group_count"), read_count(model, "ssm.time_step_rank")
    inner = read_count(model, "ssm.inner_size")
    if heads % keys or inner % heads:
        raise ValueError(f"its {heads} heads cannot share {keys} keys and a state of {inner}")
    if model.get("attention.recurrent_layers") is not None:
        recurrent = read_by_layer(model, "attention.recurrent_layers", layers)
    else:
        every = read_count(model, "full_attention_interval", default=_USUAL_INTERVAL)
        recurrent = [(index + 1) % every for index in range(layers)]
    return {
        "num_hidden_layers": layers,
        "layer_types": ["linear_attention" if each else "full_attention" for each in recurrent],
        "linear_num_key_heads": keys,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": read_count(model, "ssm.state_size"),
        "linear_value_head_dim": inner // heads,
        "linear_conv_kernel_dim": read_count(model, "ssm.conv_kernel"),
    }


def _mixture(model: GgufModel) -> Values:
    return read_experts(model) | {
        "moe_intermediate_size": expert_width(model),
        "shared_expert_intermediate_size": expert_width(model, "ffn_up_shexp"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    }


def kimi_linear(model: GgufModel, values: Values) -> Values:
    """Kimi Linear, with DeepSeek's latent attention in layers that have a KV head."""
    layers, first = values["num_hidden_layers"], read_first_sparse(model, values)
    if model.get("expert_gating_func", _SIGMOID) != _SIGMOID:
        raise ValueError(f"its experts are chosen as {model.get('expert_gating_func')!r} says")
    kinds = read_by_layer(model, "attention.head_count_kv", layers)
    rotary, keys = (
        read_count(model, key) for key in ("rope.dimension_count", "attention.key_length_mla")
    )
    if rotary >= keys:
        raise ValueError(f"it turns {rotary} of {keys} dimensions of a key")
    experts, width = read_experts(model, first), expert_width(model, layer=first)
    compressed = has_tensor(model, "attn_q_a.weight")
    return {
        "model_type": "kimi_linear",
        "layer_types": ["full_attention" if each else "linear_attention" for each in kinds],
        "num_key_value_heads": values["num_attention_heads"],
        "linear_num_heads": values["num_attention_heads"],
        "linear_head_dim": read_count(model, "kda.head_dim"),
        "linear_conv_kernel_dim": read_count(model, "ssm.conv_kernel"),
        "kv_lora_rank": read_count(model, "attention.kv_lora_rank"),
        "q_lora_rank": read_count(model, "attention.q_lora_rank") if compressed else 0,
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": keys - rotary,
        "v_head_dim": read_count(model, "attention.value_length_mla"),
        "num_experts": experts["num_experts"],
        "num_experts_per_token": experts["num_experts_per_tok"],
        "moe_intermediate_size": width,
        "num_shared_experts": expert_width(model, "ffn_up_shexp", first) // width,
        "moe_renormalize": True,
        "routed_scaling_factor": read_number(model, "expert_weights_scale", 1.0) or 1.0,
        "num_expert_group": read_count(model, "expert_group_count", default=1),
        "topk_group": read_count(model, "expert_group_used_count", default=1),
        "first_k_dense_replace": first,
    }
