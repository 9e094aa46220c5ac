"""Gemma 2 and 3; 3n and 4, in which layers differ in their heads and reuse others' K and V."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from tgi_trio.model.families.mixtures import SEPARATE_EXPERTS
from tgi_trio.model.gguf.files import GgufModel
from tgi_trio.model.gguf.stated import (
    FULL,
    SLIDING,
    Values,
    expert_width,
    find_shape,
    read_by_layer,
    read_count,
    read_experts,
    read_factors,
    read_kinds,
)

_KEEPING: Final = 20  # layers of Gemma 3n with their own K and V, in files that do not state it
# Roles of the tensors around a layer of Gemma 3n -> names in the layer.
STREAMS: Final = {
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale.weight": "altup.correct_output_scale",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}


def gemma2(model: GgufModel, values: Values) -> Values:
    return {
        "model_type": "gemma2",
        "sliding_window": model.get("attention.sliding_window", 4096),
        "attn_logit_softcapping": model.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": model.get("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scalar(values, largest=46),
    }


def gemma3(model: GgufModel, values: Values) -> Values:
    return {
        "model_type": "gemma3_text",
        "sliding_window": model.get("attention.sliding_window", 1024),
        "sliding_window_pattern": 6,
        "rope_local_base_freq": model.get("rope.freq_base_swa", 10000.0),
        "rope_theta": values.get("rope_theta", 1000000.0),
        "final_logit_softcapping": model.get("final_logit_softcapping", 0.0),
        "query_pre_attn_scalar": _query_scalar(values, largest=62),
    }


def _query_scalar(values: Values, largest: int) -> int:
    """Return the number whose root divides scores: a head's length, except in the largest model.

    No file states it; like llama.cpp, we recognise that model by its number of layers.
    """
    if values["num_hidden_layers"] == largest:
        return int(values["hidden_size"] // values["num_attention_heads"])
    return int(values["head_dim"])


def gemma3n(model: GgufModel, values: Values) -> Values:
    layers, widths = values["num_hidden_layers"], values["intermediate_size"]
    shared = model.get("attention.shared_kv_layers", max(layers - _KEEPING, 0))
    streams = read_count(model, "altup.num_inputs", default=4)
    active = model.get("altup.active_idx", 0)
    if not isinstance(active, int) or not 0 <= active < streams:
        raise ValueError(f"its {model.architecture}.altup.active_idx cannot be {active!r}")
    return (
        {
            "model_type": "gemma3n_text",
            "intermediate_size": widths if isinstance(widths, list) else [widths] * layers,
            "layer_types": read_kinds(model, layers, every=5),
            "sliding_window": read_count(model, "attention.sliding_window", default=512),
            "num_kv_shared_layers": _check_shared(model, shared, layers),
            "altup_num_inputs": streams,
            "altup_active_idx": active,
            "laurel_rank": find_shape(model, "laurel_l")[0],
            "rope_scaling": None,
            "rope_parameters": {
                FULL: _read_rotary(values.get("rope_theta", 1e6)),
                SLIDING: _read_rotary(model.get("rope.freq_base_swa", 1e4)),
            },
        }
        | _read_per_layer_inputs(model)
        | _sparsity(model, layers)
        | _soft_cap(model)
    )


def gemma4(model: GgufModel, values: Values) -> Values:
    layers, wide = values["num_hidden_layers"], values["head_dim"]
    kinds = read_kinds(model, layers, every=6)
    shared = _check_shared(model, model.get("attention.shared_kv_layers", 0), layers)
    narrow = read_count(model, "attention.key_length_swa")
    rotary_dims = read_count(model, "rope.dimension_count_swa", default=narrow)
    if rotary_dims > narrow:
        raise ValueError(f"it turns {rotary_dims} of {narrow} dimensions")
    heads = read_by_layer(model, "attention.head_count_kv", layers)
    whole = [place for place in range(layers) if kinds[place] == FULL]
    full, sliding = (
        _only(model, [each for each, own in zip(heads, kinds, strict=True) if own == kind])
        for kind in (FULL, SLIDING)
    )
    config: Values = {
        "model_type": "gemma4_text",
        "head_dim": narrow,
        "num_key_value_heads": sliding or full,
        "per_layer_config": {
            str(place): {"head_dim": wide, "num_key_value_heads": full or sliding}
            for place in dict.fromkeys((*whole, layers - 1))  # the last has no window in any case
        },
        "attention_k_eq_v": bool(whole) and f"blk.{whole[0]}.attn_v.weight" not in model.tensors,
        "layer_types": kinds,
        "sliding_window": read_count(model, "attention.sliding_window"),
        "num_kv_shared_layers": shared,
        "rope_scaling": None,
        "rope_parameters": {
            FULL: _read_rotary(values.get("rope_theta", 1e6)) | _proportion(model, wide),
            SLIDING: _read_rotary(model.get("rope.freq_base_swa", 1e4))
            | {"partial_rotary_factor": rotary_dims / narrow},
        },
    }
    if model.get("embedding_length_per_layer_input"):
        config |= _read_per_layer_inputs(model)
    else:
        config["hidden_size_per_layer_input"] = 0
    if model.get("expert_count"):
        experts = read_experts(model)
        config |= {
            SEPARATE_EXPERTS: True,
            "enable_moe_block": True,
            "num_experts": experts["num_experts"],
            "top_k_experts": experts["num_experts_per_tok"],
            "moe_intermediate_size": expert_width(model),
        }
    return config | _widths(model, layers, shared) | _soft_cap(model)


def _check_shared(model: GgufModel, shared: object, layers: int) -> int:
    if not isinstance(shared, int) or not 0 <= shared < layers:
        raise ValueError(f"its {model.architecture}.attention.shared_kv_layers is {shared!r}")
    return shared


def _only(model: GgufModel, heads: Sequence[int]) -> int:
    """Return the number of KV heads of all layers of a kind, 0 if there are no such layers.

    Raises ValueError if they differ.
    """
    if len(set(heads)) > 1 or 0 in heads:
        raise ValueError(
            f"its {model.architecture}.attention.head_count_kv differs among layers of a kind"
        )
    return heads[0] if heads else 0


def _widths(model: GgufModel, layers: int, shared: int) -> Values:
    """Return the width of MLPs, which may be double in layers that reuse others' K and V."""
    widths = read_by_layer(model, "feed_forward_length", layers)
    own = widths[0]
    double = [own] * (layers - shared) + [2 * own] * shared
    if not own or widths not in (double, [own] * layers):
        raise ValueError(f"its {model.architecture}.feed_forward_length cannot be {widths}")
    return {"intermediate_size": own, "use_double_wide_mlp": bool(shared) and widths == double}


def _read_per_layer_inputs(model: GgufModel) -> Values:
    if "per_layer_token_embd.weight" not in model.tensors:
        raise ValueError("it has no tensor 'per_layer_token_embd.weight'")
    return {
        "hidden_size_per_layer_input": read_count(model, "embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": model.tensors["per_layer_token_embd.weight"][1].shape[0],
    }


def _sparsity(model: GgufModel, layers: int) -> Values:
    """Return the part of the gates that is cut, from the bound in standard deviations."""
    bounds = model.get("activation_sparsity_scale")
    if bounds is None:
        return {}
    if not isinstance(bounds, list) or len(bounds) != layers:
        raise ValueError(f"its {model.architecture}.activation_sparsity_scale names not all layers")
    if not all(isinstance(bound, float) and bound < 10 for bound in bounds):  # not NaN either
        raise ValueError(f"its {model.architecture}.activation_sparsity_scale cannot be {bounds}")
    parts = [(1 + math.erf(bound / math.sqrt(2))) / 2 for bound in bounds]
    return {"activation_sparsity_pattern": parts}


def _soft_cap(model: GgufModel) -> Values:
    cap = model.get("final_logit_softcapping")
    return {} if cap is None else {"final_logit_softcapping": cap}


def _read_rotary(theta: float) -> Values:
    return {"rope_type": "default", "rope_theta": theta}


def _proportion(model: GgufModel, head: int) -> Values:
    """Return the rotated part of a head, if the file marks the rotated pairs by divisors.

    Raises ValueError for a table of frequencies with any other meaning.
    """
    divisors = read_factors(model, "rope_freqs.weight", head)
    if divisors is None:
        return {}
    rotary_dims = sum(divisor == 1.0 for divisor in divisors)
    still = divisors[rotary_dims:]
    if divisors[:rotary_dims] != [1.0] * rotary_dims or not all(
        divisor >= 1e20 for divisor in still
    ):
        raise ValueError("its tensor 'rope_freqs.weight' turns pairs by less than whole")
    return {"rope_type": "proportional", "partial_rotary_factor": 2 * rotary_dims / head}
