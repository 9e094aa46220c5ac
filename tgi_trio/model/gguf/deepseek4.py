"""DeepSeek V4: its metadata in the family's terms, and the places of its tensors."""

from __future__ import annotations

from typing import Final

from tgi_trio.model.families.mixtures import SEPARATE_EXPERTS
from tgi_trio.model.gguf.files import GgufModel
from tgi_trio.model.gguf.stated import (
    Values,
    check_normalised,
    read_by_layer,
    read_count,
    read_counted_experts,
    read_expert_scale,
    read_limit,
    read_number,
    read_own_layers,
)

_SQRT_SOFTPLUS: Final = 4  # of `expert_gating_func`
_WINDOW, _SPARSE, _HEAVY = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
ROLES: Final = {
    "attn_q_a": ("query_down",),
    "attn_q_a_norm": ("query_norm",),
    "attn_q_b": ("query_up",),
    "attn_kv": ("key",),
    "attn_kv_a_norm": ("key_norm",),
    "attn_output_a": ("output_down",),
    "attn_output_b": ("output",),
    "indexer.attn_q_b": ("index_query",),
    "indexer.proj": ("index_weights",),
}
_COMPRESSOR, _INDEX = "self_attn.compressor.", "self_attn.compressor.indexer."
# Roles with their ending -> names in a layer, or of the model.
PARTS: Final = {
    "ffn_gate_tid2eid.weight": "mlp.gate.tid2eid",
    **{
        f"{role}_{part}.weight": name + ours
        for role, name in (("attn_compressor", _COMPRESSOR), ("indexer_compressor", _INDEX))
        for part, ours in (
            ("kv", "kv_proj.weight"),
            ("gate", "gate_proj.weight"),
            ("ape", "position_bias"),
            ("norm", "kv_norm.weight"),
        )
    },
    **{
        f"hc_{part}_{number}.weight": f"{part}_hc.{number}"
        for part in ("attn", "ffn")
        for number in ("fn", "base", "scale")
    },
    **{
        f"output_hc_{number}.weight": f"model.hc_head.hc_{number}"
        for number in ("fn", "base", "scale")
    },
}


def deepseek4(model: GgufModel, values: Values) -> Values:
    """DeepSeek V4; its tensors show which layers have an index, and which a table of experts."""
    gating = model.get("expert_gating_func", _SQRT_SOFTPLUS)
    if gating != _SQRT_SOFTPLUS:
        raise ValueError(f"its {model.architecture}.expert_gating_func is {gating!r}")
    check_normalised(model)
    layers = read_own_layers(model, values)
    tables = [f"blk.{layer}.ffn_gate_tid2eid.weight" in model.tensors for layer in range(layers)]
    return {
        "model_type": "deepseek_v4",
        SEPARATE_EXPERTS: True,
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": 0,
        "num_key_value_heads": 1,
        "q_lora_rank": read_count(model, "attention.q_lora_rank"),
        "o_groups": read_count(model, "attention.output_group_count"),
        "o_lora_rank": read_count(model, "attention.output_lora_rank"),
        "sliding_window": read_count(model, "attention.sliding_window"),
        "index_n_heads": read_count(model, "attention.indexer.head_count"),
        "index_head_dim": read_count(model, "attention.indexer.key_length"),
        "index_topk": read_count(model, "attention.indexer.top_k"),
        "hc_mult": read_count(model, "hyper_connection.count"),
        "hc_sinkhorn_iters": read_count(model, "hyper_connection.sinkhorn_iterations"),
        "hc_eps": read_number(model, "hyper_connection.epsilon", 1e-6),
        "mlp_layer_types": ["hash_moe" if each else "moe" for each in tables],
        "routed_scaling_factor": read_expert_scale(model),
        "swiglu_limit": read_limit(model, layers),
        "rope_scaling": None,
        "rope_parameters": _read_rotary(model, values),
    } | _compression(model, layers) | read_counted_experts(
        model, 0, "n_routed_experts", "num_experts_per_tok"
    )  # fmt: skip


def _compression(model: GgufModel, layers: int) -> Values:
    """Return the kinds of layers, and the tokens of a run; ValueError if layers of a kind differ.

    A layer without runs has the ratio 0.
    """
    rates: dict[str, int] = {}
    kinds = []
    for layer, rate in enumerate(read_by_layer(model, "attention.compress_ratios", layers)):
        indexed = f"blk.{layer}.indexer.proj.weight" in model.tensors
        kind = (_SPARSE if indexed else _HEAVY) if rate else _WINDOW
        if rates.setdefault(kind, rate) != rate:
            raise ValueError(f"its {model.architecture}.attention.compress_ratios differ in a kind")
        kinds.append(kind)
    rates.pop(_WINDOW, None)
    return {"layer_types": kinds, "compress_rates": rates}


def _read_rotary(model: GgufModel, values: Values) -> Values:
    """Return the rotary parameters of layers without runs, and with them; these are scaled."""
    part = values.get("partial_rotary_factor", 1.0)
    main = {"rope_type": "default", "rope_theta": values.get("rope_theta", 1e4)}
    base = read_number(model, "attention.compress_rope_freq_base", 160000.0)
    scaling = dict(values.get("rope_scaling") or {"rope_type": "default"})
    if scaling["rope_type"] == "yarn":
        scaling.setdefault("attention_factor", 1.0)
    runs = scaling | {"rope_theta": base}
    return {
        "main": main | {"partial_rotary_factor": part},
        "compress": runs | {"partial_rotary_factor": part},
    }
