"""Granite 4 H: Mamba-2 where a layer has no heads of K and V, and what its mixer is called."""

from __future__ import annotations

from typing import Final

from tgi_trio.model.families.mixtures import EXPERTS_APART
from tgi_trio.model.gguf.files import GgufModel
from tgi_trio.model.gguf.stated import Values, expert_width, read_count, read_experts

# Roles, with their ending where the mixer's name for it has another -> parts of the mixer's name.
MAMBA2: Final = {
    "ssm_in": "in_proj",
    "ssm_out": "out_proj",
    "ssm_conv1d": "conv1d",
    "ssm_norm": "norm",
    "ssm_a": "A_log",
    "ssm_d": "D",
    "ssm_dt.bias": "dt_bias",
}


def granitehybrid(model: GgufModel, values: Values) -> Values:
    """What differs from Granite's dense models."""
    kv_heads = model.get("attention.head_count_kv")
    if not isinstance(kv_heads, list) or len(kv_heads) != values["num_hidden_layers"]:
        raise ValueError(f"its {model.architecture}.attention.head_count_kv names not all layers")
    heads, inner = read_count(model, "ssm.time_step_rank"), read_count(model, "ssm.inner_size")
    if inner % heads:
        raise ValueError(f"its {heads} heads cannot share a state of {inner}")
    said: Values = {
        "model_type": "granitemoehybrid",
        EXPERTS_APART: True,
        "layer_types": ["attention" if count else "mamba" for count in kv_heads],
        "position_embedding_type": "rope" if model.get("rope.scaling.finetuned") else "nope",
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_d_state": read_count(model, "ssm.state_size"),
        "mamba_d_conv": read_count(model, "ssm.conv_kernel"),
        "mamba_n_groups": read_count(model, "ssm.group_count"),
        "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in model.tensors),
        "mamba_proj_bias": any(name.endswith("ssm_in.bias") for name in model.tensors),
    }
    if not model.get("expert_count"):
        width = expert_width(model, "ffn_up")
        return said | {"num_local_experts": 0, "shared_intermediate_size": width}
    return said | read_experts(model) | {
        "intermediate_size": expert_width(model),
        "shared_intermediate_size": expert_width(model, "ffn_up_shexp"),
    }  # fmt: skip
