"""LFM2 and its mixtures: short convolutions in layers without KV heads."""

from __future__ import annotations

from tgi_trio.model.gguf.files import GgufModel
from tgi_trio.model.gguf.stated import (
    Values,
    expert_width,
    read_by_layer,
    read_count,
    read_experts,
    read_first_sparse,
)


def lfm2(model: GgufModel, values: Values) -> Values:
    return _both(model, values) | {
        "model_type": "lfm2",
        "block_auto_adjust_ff_dim": False,  # the file has the adjusted width
        "block_ff_dim": values["intermediate_size"],
    }


def lfm2moe(model: GgufModel, values: Values) -> Values:
    dense = read_first_sparse(model, values)
    experts = read_experts(model, dense)
    return _both(model, values) | {
        "model_type": "lfm2_moe",
        "num_dense_layers": dense,
        "num_experts": experts["num_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "moe_intermediate_size": expert_width(model, layer=dense),
        "use_expert_bias": f"blk.{dense}.exp_probs_b.bias" in model.tensors,
        "norm_topk_prob": True,
    }


def _both(model: GgufModel, values: Values) -> Values:
    heads = read_by_layer(model, "attention.head_count_kv", values["num_hidden_layers"])
    kinds = ["full_attention" if count else "conv" for count in heads]
    return {
        "layer_types": kinds,
        "norm_eps": values.get("rms_norm_eps", 1e-5),
        "conv_L_cache": read_count(model, "shortconv.l_cache"),
        "conv_bias": any(name.endswith("shortconv.conv.bias") for name in model.tensors),
    }
