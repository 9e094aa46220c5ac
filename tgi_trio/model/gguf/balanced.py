"""Mixtures that are made as DeepSeek-V3's, on Llama's attention: metadata in their families' words.

Also Granite's and Hunyuan's first ones, and ERNIE's, whose files state the same.
"""

from __future__ import annotations

from tgi_trio.model.families.mixtures import EXPERTS_APART
from tgi_trio.model.gguf.files import GgufModel
from tgi_trio.model.gguf.stated import (
    Values,
    expert_width,
    read_count,
    read_experts,
    read_first_sparse,
    read_number,
    read_own_layers,
)

_SIGMOID = 2  # of `expert_gating_func`


def glm4moe(model: GgufModel, values: Values) -> Values:
    """GLM-4.5 to 4.7. The file counts the layers that guess the token after the next as well."""
    own = {"num_hidden_layers": read_own_layers(model, values)}
    return own | {
        "model_type": "glm4_moe",
        "use_qk_norm": "blk.0.attn_q_norm.weight" in model.tensors,
    } | _balanced(model, values | own)  # fmt: skip


def dots1(model: GgufModel, values: Values) -> Values:
    return {"model_type": "dots1"} | _balanced(model, values)


def ernie4_5_moe(model: GgufModel, values: Values) -> Values:
    first = read_first_sparse(model, values)
    every = read_count(model, "interleave_moe_layer_step", default=1)
    sparse = first + -(first + 1) % every
    return {
        "model_type": "ernie4_5_moe",
        "use_bias": values["attention_bias"],
        "moe_layer_start_index": first,
        "moe_layer_interval": every,
    } | _counted(model, sparse, "moe_num_experts", "moe_k", "moe_num_shared_experts")


def minimax_m2(model: GgufModel, values: Values) -> Values:
    _check_sigmoid(model)
    return {
        "model_type": "minimax_m2",
        "intermediate_size": expert_width(model),
        "rotary_dim": model.get("rope.dimension_count") or values["head_dim"],
    } | read_experts(model)


def hunyuan_moe(model: GgufModel, values: Values) -> Values:
    """Hunyuan's first mixtures, whose experts and shared expert are all as wide."""
    width = expert_width(model)
    if expert_width(model, "ffn_up_shexp") != width:
        raise ValueError("its shared expert is not as wide as the others")
    experts = read_experts(model)
    return {
        "model_type": "hunyuan_v1_moe",
        "intermediate_size": width,
        "num_experts": experts["num_experts"],
        "moe_topk": experts["num_experts_per_tok"],
    }


def granitemoe(model: GgufModel, values: Values) -> Values:
    """What differs from Granite's dense models."""
    return {
        "model_type": "granitemoe",
        EXPERTS_APART: True,
        "intermediate_size": expert_width(model),
    } | read_experts(model)


def _balanced(model: GgufModel, values: Values) -> Values:
    """Return what is said of experts whose layers come behind dense ones."""
    _check_sigmoid(model)
    first = read_first_sparse(model, values)
    return {
        "first_k_dense_replace": first,
        "routed_scaling_factor": read_number(model, "expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": bool(model.get("expert_weights_norm", False)),
        "n_group": read_count(model, "expert_group_count", default=1),
        "topk_group": read_count(model, "expert_group_used_count", default=1),
    } | _counted(model, first, "n_routed_experts", "num_experts_per_tok", "n_shared_experts")


def _counted(model: GgufModel, layer: int, count: str, used: str, shared: str) -> Values:
    """Return how wide experts are, how many there are, take part, and are everybody's.

    `layer`: the first that has any; the last three: a family's names for these.
    """
    experts, width = read_experts(model, layer), expert_width(model, layer=layer)
    role = "ffn_up_shexp"
    all_shared = 0
    if f"blk.{layer}.{role}.weight" in model.tensors:
        all_shared = expert_width(model, role, layer)
    if all_shared % width:
        raise ValueError(f"its shared experts are {all_shared} wide, and others {width}")
    return {
        "moe_intermediate_size": width,
        count: experts["num_experts"],
        used: experts["num_experts_per_tok"],
        shared: all_shared // width,
    }


def _check_sigmoid(model: GgufModel) -> None:
    gating = model.get("expert_gating_func", _SIGMOID)  # older files do not state it
    if gating != _SIGMOID:
        raise ValueError(f"its {model.architecture}.expert_gating_func is {gating!r}")
