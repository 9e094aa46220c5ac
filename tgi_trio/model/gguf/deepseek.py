"""DeepSeek V2 and V3, one architecture in GGUF, and similar models.

These are Mistral 4, and those with sparse attention by an index, DeepSeek V3.2 and GLM 5.
"""

from __future__ import annotations

from typing import Final

from tgi_trio.model.families.mixtures import SEPARATE_EXPERTS
from tgi_trio.model.gguf.files import GgufModel
from tgi_trio.model.gguf.stated import (
    Values,
    find_shape,
    read_by_layer,
    read_count,
    read_experts,
    read_first_sparse,
    read_number,
    read_own_layers,
    read_query_scale,
)

_SOFTMAX, _SIGMOID = 1, 2  # of `expert_gating_func`
# Groups of experts and groups used, in models older than the keys that state them.
_GROUPS_OF_256_EXPERTS: Final = (8, 4)
_TYPES: Final = "attention.indexer.types"  # of layers: whether they have their own index
# Roles of an index's tensors -> fields of `Names`.
INDEX: Final = {
    "indexer.attn_q_b": ("index_query",),
    "indexer.attn_k": ("index_key",),
    "indexer.k_norm": ("index_norm",),
    "indexer.proj": ("index_weights",),
}


def deepseek2(model: GgufModel, values: Values) -> Values:
    """Return the config; the gating function of experts shows which of the families it is.

    Youtu has none. Raises ValueError for a variant that belongs to no family.
    """
    if not model.get("expert_count"):
        return _latents(model) | _rotary(model, values) | {"model_type": "youtu"}
    experts = _experts(model, values, gating=_SOFTMAX)
    return _latents(model) | experts | _rotary(model, values)


def deepseek32(model: GgufModel, values: Values) -> Values:
    return _indexed(model, values, _GROUPS_OF_256_EXPERTS) | {"model_type": "deepseek_v32"}


def minicpm3(model: GgufModel, values: Values) -> Values:
    """MiniCPM3, whose scales no file states: they are those of the published model."""
    heads = values["num_attention_heads"]
    return _latents(model, find_shape(model, "attn_output")[-1] // heads) | {
        "model_type": "minicpm3",
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
    }


def glm_dsa(model: GgufModel, values: Values) -> Values:
    """GLM 5. In files older than shared choices, missing tensors show which layers share."""
    config = _indexed(model, values, (1, 1))
    layers = range(config["num_hidden_layers"])
    own = [f"blk.{layer}.indexer.attn_k.weight" in model.tensors for layer in layers]
    if model.get(_TYPES) is not None:
        own = [kind > 0 for kind in read_by_layer(model, _TYPES, len(layers))]
    kinds = ["full" if each else "shared" for each in own]
    return config | {"model_type": "glm_moe_dsa", "indexer_types": kinds}


def _indexed(model: GgufModel, values: Values, of_256: tuple[int, int]) -> Values:
    own = {"num_hidden_layers": read_own_layers(model, values)}
    experts = _experts(model, values | own, gating=_SIGMOID, of_256=of_256)
    if experts["model_type"] != "deepseek_v3":
        raise ValueError("its experts are weighed by a softmax")
    return own | _latents(model) | experts | _rotary(model, values) | {
        "index_n_heads": read_count(model, "attention.indexer.head_count"),
        "index_head_dim": read_count(model, "attention.indexer.key_length"),
        "index_topk": read_count(model, "attention.indexer.top_k"),
    }  # fmt: skip


def _latents(model: GgufModel, value_dim: int | None = None) -> Values:
    """Return the config of latent attention; `value_dim`: of a head, if no file states it."""
    rotary = read_count(model, "rope.dimension_count")
    keys = read_count(model, "attention.key_length_mla", "attention.key_length")
    config: Values = {
        "kv_lora_rank": read_count(model, "attention.kv_lora_rank"),
        "q_lora_rank": model.get("attention.q_lora_rank"),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": keys - rotary,
        "v_head_dim": value_dim
        or read_count(model, "attention.value_length_mla", "attention.value_length"),
        "attention_bias": False,
        "head_dim": rotary,
    }
    if config["qk_nope_head_dim"] <= 0:
        raise ValueError(f"it turns {rotary} of {keys} dimensions of a key")
    if config["q_lora_rank"] is not None:
        config["q_lora_rank"] = read_count(model, "attention.q_lora_rank")
    return config


def _experts(
    model: GgufModel,
    values: Values,
    *,
    gating: int,
    of_256: tuple[int, int] = _GROUPS_OF_256_EXPERTS,
) -> Values:
    """Return the config of experts, with defaults for what the file does not state.

    `gating`: the default gating function; `of_256`: default groups and groups used of 256 experts.
    """
    gating = model.get("expert_gating_func", gating)
    if gating not in (_SOFTMAX, _SIGMOID):
        raise ValueError(f"its {model.architecture}.expert_gating_func is {gating!r}")
    newer, normalised = gating == _SIGMOID, bool(model.get("expert_weights_norm", False))
    dense = read_first_sparse(model, values)
    counts = read_experts(model, dense)
    usual = of_256 if newer and counts["num_experts"] == 256 else (1, 1)
    groups = read_count(model, "expert_group_count", default=usual[0])
    used = read_count(model, "expert_group_used_count", default=usual[1])
    if not 0 < used <= groups or counts["num_experts"] % groups:
        raise ValueError(f"its {counts['num_experts']} experts cannot be {used} of {groups} groups")
    if normalised and not newer and groups > 1:
        raise ValueError("the weights of its experts are normalised behind a softmax of groups")
    older = "mistral4" if normalised else "deepseek_v2"
    return counts | {
        "model_type": "deepseek_v3" if newer else older,
        SEPARATE_EXPERTS: True,
        "n_routed_experts": counts["num_experts"],
        "n_shared_experts": read_count(model, "expert_shared_count"),
        "moe_intermediate_size": read_count(model, "expert_feed_forward_length"),
        "routed_scaling_factor": read_number(model, "expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": normalised,
        "first_k_dense_replace": dense,
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
        "n_group": groups,
        "topk_group": used,
    }


def _rotary(model: GgufModel, values: Values) -> Values:
    """Return the rotary scaling, with the factor by which YaRN raises scores of longer contexts.

    The file has a tenth of that factor.
    """
    sharper = 10 * read_number(model, "rope.scaling.yarn_log_multiplier", 0.0)
    return read_query_scale(model, values, sharper=sharper)
