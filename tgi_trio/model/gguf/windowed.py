"""Mixtures most of whose layers have a window: their metadata in the families' terms."""

from __future__ import annotations

from tgi_trio.model.families.step import WITHOUT_CODE
from tgi_trio.model.gguf.files import GgufModel
from tgi_trio.model.gguf.stated import (
    FULL,
    SLIDING,
    Values,
    check_normalised,
    check_sigmoid,
    expert_width,
    find_shape,
    read_by_layer,
    read_count,
    read_counted_experts,
    read_expert_scale,
    read_first_sparse,
    read_limits,
    read_number,
    read_own_layers,
    read_sparse,
    read_windows,
)


def afmoe(model: GgufModel, values: Values) -> Values:
    """Trinity; like llama.cpp, we scale embeddings in all of its models."""
    check_sigmoid(model)
    check_normalised(model)
    first = read_first_sparse(model, values)
    return {
        "model_type": "afmoe",
        "mup_enabled": True,
        "num_dense_layers": first,
        "route_scale": read_expert_scale(model),
    } | read_windows(model, values["num_hidden_layers"], every=4) | read_counted_experts(
        model, first, "num_experts", "num_experts_per_tok", "num_shared_experts"
    )  # fmt: skip


def cohere2moe(model: GgufModel, values: Values) -> Values:
    """Command A+; what shared experts say is averaged with the others, as in llama.cpp."""
    check_sigmoid(model)
    if read_expert_scale(model) != 1.0:
        raise ValueError("the weights of its experts are multiplied by a number")
    layers = read_own_layers(model, values)
    first = read_first_sparse(model, values | {"num_hidden_layers": layers})
    counted = read_counted_experts(
        model, first, "num_experts", "num_experts_per_tok", "num_shared_experts"
    )
    eps: Values = {"layer_norm_eps": read_number(model, "attention.layer_norm_epsilon", 1e-5)}
    return {
        "model_type": "cohere2_moe",
        "num_hidden_layers": layers,
        "mlp_layer_types": ["dense"] * first + ["sparse"] * (layers - first),
        "prefix_dense_intermediate_size": values["intermediate_size"],
        "prefix_dense_sliding_window_pattern": 1,  # dense layers turn by position
        "intermediate_size": counted.pop("moe_intermediate_size"),
        "expert_selection_fn": "sigmoid",
        "norm_topk_prob": bool(model.get("expert_weights_norm", False)),
        "logit_scale": read_number(model, "logit_scale", 0.0625),
    } | counted | (
        {"rms_norm_eps": values["rms_norm_eps"]} if values.get("rms_norm_eps") else eps
    ) | read_windows(model, layers, every=4, first=True)  # fmt: skip


def mellum(model: GgufModel, values: Values) -> Values:
    """Mellum 2, in which rotary scaling is that of layers without a window alone."""
    layers = values["num_hidden_layers"]
    sparse = read_sparse(model, layers)
    return {
        "model_type": "mellum",
        "norm_topk_prob": True,
        "mlp_layer_types": ["sparse" if each else "dense" for each in sparse],
        "rope_scaling": None,
        "rope_parameters": _read_rotary_by_kind(model, values),
    } | read_windows(model, layers, every=4) | read_counted_experts(
        model, sparse.index(True), "num_experts", "num_experts_per_tok"
    )  # fmt: skip


def laguna(model: GgufModel, values: Values) -> Values:
    """Laguna; the width of a layer's gates shows whether they are one per head or per number."""
    check_sigmoid(model)
    check_normalised(model)
    layers, head = values["num_hidden_layers"], values["head_dim"]
    heads = read_by_layer(model, "attention.head_count", layers)
    first = read_first_sparse(model, values)
    windows = read_windows(model, layers, every=4, first=True)
    return {
        "model_type": "laguna",
        "num_attention_heads": heads[0],
        "num_attention_heads_per_layer": heads,
        "gating": _gating(model, heads, head),
        "mlp_layer_types": ["dense"] * first + ["sparse"] * (layers - first),
        "moe_routed_scaling_factor": read_expert_scale(model),
        "shared_expert_intermediate_size": expert_width(model, "ffn_up_shexp", first),
        "layer_types": [FULL] * layers,
        "rope_scaling": None,
        "rope_parameters": _read_rotary_by_kind(model, values),
    } | windows | read_counted_experts(
        model, first, "num_experts", "num_experts_per_tok"
    )  # fmt: skip


def _gating(model: GgufModel, heads: list[int], head: int) -> str:
    """Return which gates heads have; raises ValueError for gates of any other width."""
    widths = [find_shape(model, "attn_gate", layer)[0] for layer in range(len(heads))]
    if widths == heads:
        return "per-head"
    if widths == [head * each for each in heads]:
        return "per-element"
    raise ValueError(f"the gates of its heads are {widths}")


def step35(model: GgufModel, values: Values) -> Values:
    """The text of Step 3.7 Flash: layers with a window have more heads, and turn whole ones."""
    check_sigmoid(model)
    check_normalised(model)
    layers = read_own_layers(model, values)
    windows = read_windows(model, layers)
    kinds = windows.get("layer_types", [FULL] * layers)
    heads = _by_kind(model, "attention.head_count", kinds)
    kv_heads = _by_kind(model, "attention.head_count_kv", kinds)
    if len(set(kv_heads.values())) > 1:
        raise ValueError("layers with a window have another number of KV heads")
    own = heads.get(FULL, heads.get(SLIDING, 0))
    sparse = read_sparse(model, layers)
    first = sparse.index(True)
    return {
        "model_type": "step3p5",
        WITHOUT_CODE: True,
        "num_hidden_layers": layers,
        "num_attention_heads": own,
        "num_sliding_attention_heads": heads.get(SLIDING, own),
        "num_key_value_heads": next(iter(kv_heads.values())),
        "mlp_layer_types": ["sparse" if each else "dense" for each in sparse],
        "moe_router_scaling_factor": read_expert_scale(model),
        "share_expert_dim": expert_width(model, "ffn_up_shexp", first),
        "swiglu_limits": read_limits(model, "swiglu_clamp_exp", layers),
        "swiglu_limits_shared": read_limits(model, "swiglu_clamp_shexp", layers),
        "rope_scaling": None,
        "rope_parameters": _read_rotary_by_kind(model, values | {"partial_rotary_factor": 0.5}),
    } | windows | read_counted_experts(
        model, first, "n_routed_experts", "num_experts_per_tok"
    )  # fmt: skip


def _by_kind(model: GgufModel, key: str, kinds: list[str]) -> dict[str, int]:
    """Return kind of layers -> their number of heads; raises ValueError if layers differ in it."""
    found: dict[str, int] = {}
    for kind, count in zip(kinds, read_by_layer(model, key, len(kinds)), strict=True):
        if found.setdefault(kind, count) != count or not count:
            raise ValueError(f"its {model.architecture}.{key} differs among layers of a kind")
    return found


def _read_rotary_by_kind(model: GgufModel, values: Values) -> dict[str, Values]:
    """Return the rotary parameters of both kinds of layers; the file's scaling is of FULL ones."""
    theta, head = values.get("rope_theta", 1e4), values["head_dim"]
    rotary_dims = read_count(model, "rope.dimension_count_swa", default=head)
    if rotary_dims > head:
        raise ValueError(f"it turns {rotary_dims} of {head} dimensions")
    full = {
        "rope_type": "default",
        "rope_theta": theta,
        "partial_rotary_factor": values.get("partial_rotary_factor", 1.0),
    }
    scaling = dict(values.get("rope_scaling") or {})
    pairs = int(head * full["partial_rotary_factor"]) // 2
    for factors in ("long_factor", "short_factor"):  # files may go on with those of other layers
        if factors in scaling:
            scaling[factors] = scaling[factors][:pairs]
    return {
        FULL: full | scaling,
        SLIDING: {
            "rope_type": "default",
            "rope_theta": model.get("rope.freq_base_swa", theta),
            "partial_rotary_factor": rotary_dims / head,
        },
    }
