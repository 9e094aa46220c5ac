"""Kinds of Mamba: without attention, beside it (Falcon H1), or in its place (all others)."""

from __future__ import annotations

from typing import Final

from tgi_trio.model.families.mixtures import SEPARATE_EXPERTS
from tgi_trio.model.gguf.files import GgufModel
from tgi_trio.model.gguf.stated import (
    Values,
    expert_width,
    has_tensor,
    read_by_layer,
    read_count,
    read_experts,
    read_number,
    read_own_layers,
)

# Roles, with their ending if the mixer's name has a different one -> parts of the mixer's name.
MAMBA2: Final = {
    "ssm_in": "in_proj",
    "ssm_out": "out_proj",
    "ssm_conv1d": "conv1d",
    "ssm_norm": "norm",
    "ssm_a": "A_log",
    "ssm_d": "D",
    "ssm_dt.bias": "dt_bias",
}
MAMBA1: Final = {
    "ssm_in": "in_proj",
    "ssm_out": "out_proj",
    "ssm_conv1d": "conv1d",
    "ssm_x": "x_proj",
    "ssm_dt": "dt_proj",
    "ssm_a": "A_log",
    "ssm_d": "D",
    "ssm_dt_norm": "dt_layernorm",
    "ssm_b_norm": "b_layernorm",
    "ssm_c_norm": "c_layernorm",
}
_SIGMOID: Final = 2  # of `expert_gating_func`


def granitehybrid(model: GgufModel, values: Values) -> Values:
    """The config that differs from Granite's dense models."""
    kv_heads = read_by_layer(model, "attention.head_count_kv", values["num_hidden_layers"])
    config = _bamba(model) | {
        "model_type": "granitemoehybrid",
        SEPARATE_EXPERTS: True,
        "layer_types": ["attention" if count else "mamba" for count in kv_heads],
        "position_embedding_type": "rope" if model.get("rope.scaling.finetuned") else "nope",
    }
    if not model.get("expert_count"):
        width = expert_width(model, "ffn_up")
        return config | {"num_local_experts": 0, "shared_intermediate_size": width}
    return config | read_experts(model) | {
        "intermediate_size": expert_width(model),
        "shared_intermediate_size": expert_width(model, "ffn_up_shexp"),
    }  # fmt: skip


def falcon_h1(model: GgufModel, values: Values) -> Values:
    """Falcon H1, whose scales have been multiplied into its weights."""
    heads, head_dim = _heads(model)
    return _bamba(model) | {
        "model_type": "falcon_h1",
        "mamba_d_ssm": heads * head_dim,
        "projectors_bias": has_tensor(model, "ssm_out.bias"),
        "mamba_rms_norm": has_tensor(model, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }


def nemotron_h(model: GgufModel, values: Values) -> Values:
    """Nemotron H and 3; a layer is a single part, which its tensors show."""
    layers = read_own_layers(model, values)
    heads, head_dim = _heads(model)
    kinds = [_part_of(model, layer) for layer in range(layers)]
    eps = read_number(model, "attention.layer_norm_epsilon", values.get("rms_norm_eps", 1e-5))
    config: Values = {
        "model_type": "nemotron_h",
        "num_hidden_layers": layers,
        "layers_block_type": kinds,
        "layer_norm_epsilon": eps,
        "intermediate_size": expert_width(model, "ffn_up", kinds.index("mlp"))
        if "mlp" in kinds
        else 1,
        "mamba_num_heads": heads,
        "mamba_head_dim": head_dim,
        "n_groups": read_count(model, "ssm.group_count"),
        "ssm_state_size": read_count(model, "ssm.state_size"),
        "conv_kernel": read_count(model, "ssm.conv_kernel"),
        "use_conv_bias": has_tensor(model, "ssm_conv1d.bias"),
        "use_bias": has_tensor(model, "ssm_in.bias"),
    }
    if "moe" not in kinds:
        return config
    if model.get("expert_gating_func", _SIGMOID) != _SIGMOID:
        raise ValueError(f"its experts are chosen as {model.get('expert_gating_func')!r} says")
    first = kinds.index("moe")
    experts = read_experts(model, first)
    if has_tensor(model, "ffn_latent_down.weight"):
        config["moe_latent_size"] = expert_width(model, "ffn_latent_down", first)
    return config | {
        "n_routed_experts": experts["num_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "moe_intermediate_size": expert_width(model, layer=first),
        "moe_shared_expert_intermediate_size": expert_width(model, "ffn_up_shexp", first),
        "n_group": read_count(model, "expert_group_count", default=1),
        "topk_group": read_count(model, "expert_group_used_count", default=1),
        "norm_topk_prob": bool(model.get("expert_weights_norm", True)),
        "routed_scaling_factor": read_number(model, "expert_weights_scale", 1.0) or 1.0,
    }


def jamba(model: GgufModel, values: Values) -> Values:
    """Jamba: Mamba in place of attention in most layers, and experts in every other one."""
    layers = values["num_hidden_layers"]
    inner = read_count(model, "ssm.inner_size")
    if inner % values["hidden_size"]:
        raise ValueError(f"its state of {inner} is no multiple of {values['hidden_size']}")
    attending = read_by_layer(model, "attention.head_count_kv", layers)
    sparse = [f"blk.{layer}.ffn_gate_inp.weight" in model.tensors for layer in range(layers)]
    every, first = _period([count > 0 for count in attending])
    config: Values = {
        "model_type": "jamba",
        "attn_layer_period": every,
        "attn_layer_offset": first,
        "mamba_expand": inner // values["hidden_size"],
        "mamba_d_state": read_count(model, "ssm.state_size"),
        "mamba_d_conv": read_count(model, "ssm.conv_kernel"),
        "mamba_dt_rank": read_count(model, "ssm.time_step_rank"),
        "mamba_conv_bias": has_tensor(model, "ssm_conv1d.bias"),
        "mamba_proj_bias": has_tensor(model, "ssm_in.bias"),
        "num_experts": 1,
    }
    if True not in sparse:
        return config
    every, first = _period(sparse)
    layer = sparse.index(True)
    if expert_width(model, layer=layer) != values["intermediate_size"]:
        raise ValueError("its experts are not as wide as its MLPs")
    return config | read_experts(model, layer) | {
        "expert_layer_period": every,
        "expert_layer_offset": first,
    }  # fmt: skip


def mamba(model: GgufModel, values: Values) -> Values:
    """Mamba, the first version, or Falcon Mamba, which normalises time steps, b and c."""
    normed = bool(model.get("ssm.dt_b_c_rms", False))
    return {
        "model_type": "falcon_mamba" if normed else "mamba",
        "layer_norm_epsilon": values.get("rms_norm_eps", 1e-5),
        "intermediate_size": read_count(model, "ssm.inner_size"),
        "state_size": read_count(model, "ssm.state_size"),
        "time_step_rank": read_count(model, "ssm.time_step_rank"),
        "conv_kernel": read_count(model, "ssm.conv_kernel"),
        "use_conv_bias": has_tensor(model, "ssm_conv1d.bias"),
        "use_bias": has_tensor(model, "ssm_in.bias"),
    }


def mamba2(model: GgufModel, values: Values) -> Values:
    heads, head_dim = _heads(model)
    return {
        "model_type": "mamba2",
        "layer_norm_epsilon": values.get("rms_norm_eps", 1e-5),
        "num_heads": heads,
        "head_dim": head_dim,
        "n_groups": read_count(model, "ssm.group_count", default=1),
        "state_size": read_count(model, "ssm.state_size"),
        "conv_kernel": read_count(model, "ssm.conv_kernel"),
        "use_conv_bias": has_tensor(model, "ssm_conv1d.bias"),
        "use_bias": has_tensor(model, "ssm_in.bias"),
    }


def _bamba(model: GgufModel) -> Values:
    """Return the config of a Mamba-2, by the names that Bamba gave its numbers (see `_mamba2`)."""
    heads, head_dim = _heads(model)
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": head_dim,
        "mamba_d_state": read_count(model, "ssm.state_size"),
        "mamba_d_conv": read_count(model, "ssm.conv_kernel"),
        "mamba_n_groups": read_count(model, "ssm.group_count"),
        "mamba_conv_bias": has_tensor(model, "ssm_conv1d.bias"),
        "mamba_proj_bias": has_tensor(model, "ssm_in.bias"),
    }


def _heads(model: GgufModel) -> tuple[int, int]:
    """Return the number of a Mamba-2's heads, and their size."""
    heads, inner = read_count(model, "ssm.time_step_rank"), read_count(model, "ssm.inner_size")
    if inner % heads:
        raise ValueError(f"its {heads} heads cannot share a state of {inner}")
    return heads, inner // heads


def _part_of(model: GgufModel, layer: int) -> str:
    """Return which of four kinds a layer is; raises ValueError if it is none of them."""
    signs = {
        "ssm_in": "mamba", "attn_q": "attention", "ffn_gate_inp": "moe", "ffn_up": "mlp",
    }  # fmt: skip
    for role, kind in signs.items():
        if f"blk.{layer}.{role}.weight" in model.tensors:
            return kind
    raise ValueError(f"its layer {layer} has none of the parts that layers have")


def _period(chosen: list[bool]) -> tuple[int, int]:
    """Return the period of the chosen layers, and the first; raises ValueError without a period."""
    count = len(chosen)
    if True not in chosen:
        return count + 1, count
    first = chosen.index(True)
    for every in range(first + 1, count + 1):
        if chosen == [place % every == first for place in range(count)]:
            return every, first
    raise ValueError(f"there is no rule by which {chosen} of its layers are chosen")
