"""Mixtures like DeepSeek-V3's on Llama's attention: their metadata in the families' terms.

Also Hunyuan's first ones and ERNIE's, whose files have the same keys, and the dense GLM-4.
"""

from __future__ import annotations

from tgi_trio.model.families.glm import PAIRS_IN_HALVES
from tgi_trio.model.gguf.files import GgufModel
from tgi_trio.model.gguf.stated import (
    Values,
    check_normalised,
    check_sigmoid,
    expert_width,
    read_by_layer,
    read_count,
    read_counted_experts,
    read_expert_scale,
    read_experts,
    read_first_sparse,
    read_number,
    read_own_layers,
    read_sparse,
    read_windows,
)


def glm4(model: GgufModel, values: Values) -> Values:
    """GLM-4, and the text of its vision models.

    If positions have sections, llama.cpp stores rotated pairs half a head apart.
    """
    sections = model.get("rope.dimension_sections")
    halves = isinstance(sections, list) and all(each > 0 for each in sections[:2])
    return {
        "model_type": "glm4",
        "num_hidden_layers": read_own_layers(model, values),
        PAIRS_IN_HALVES: halves,
    }


def chatglm(model: GgufModel, values: Values) -> Values:
    """ChatGLM 2 and 3, and GLM-4 9B, with norms before each part alone."""
    return {"model_type": "glm"}


def glm4moe(model: GgufModel, values: Values) -> Values:
    """GLM-4.5 to 4.7. The file's count of layers includes those for multi-token prediction."""
    own = {"num_hidden_layers": read_own_layers(model, values)}
    return own | {
        "model_type": "glm4_moe",
        "use_qk_norm": "blk.0.attn_q_norm.weight" in model.tensors,
    } | _balanced(model, values | own)  # fmt: skip


def bailingmoe2(model: GgufModel, values: Values) -> Values:
    """Ling and Ring 2, which GLM-4.5 resembles; layers that draft further tokens are not read."""
    own = {"num_hidden_layers": read_own_layers(model, values), "num_nextn_predict_layers": 0}
    return own | {"model_type": "glm4_moe", "use_qk_norm": True} | _balanced(model, values | own)


def dots1(model: GgufModel, values: Values) -> Values:
    return {"model_type": "dots1"} | _balanced(model, values)


def exaone_moe(model: GgufModel, values: Values) -> Values:
    """K-EXAONE. The file's count of layers includes those for multi-token prediction."""
    layers = read_own_layers(model, values)
    own = {"num_hidden_layers": layers} | read_windows(model, layers, every=4)
    return own | {"model_type": "exaone_moe"} | _balanced(
        model, values | own, "num_experts", "num_shared_experts"
    )  # fmt: skip


def ernie4_5_moe(model: GgufModel, values: Values) -> Values:
    first = read_first_sparse(model, values)
    every = read_count(model, "interleave_moe_layer_step", default=1)
    sparse = first + -(first + 1) % every
    return {
        "model_type": "ernie4_5_moe",
        "use_bias": values["attention_bias"],
        "moe_layer_start_index": first,
        "moe_layer_interval": every,
    } | read_counted_experts(model, sparse, "moe_num_experts", "moe_k", "moe_num_shared_experts")


def minimax_m2(model: GgufModel, values: Values) -> Values:
    check_sigmoid(model)
    return {
        "model_type": "minimax_m2",
        "intermediate_size": expert_width(model),
        "rotary_dim": model.get("rope.dimension_count") or values["head_dim"],
    } | read_experts(model)


def minimax_m3(model: GgufModel, values: Values) -> Values:
    """MiniMax-M3, whose tensors show which layers have an index. Limits of gates are not stated."""
    check_sigmoid(model)
    check_normalised(model)
    layers = values["num_hidden_layers"]
    sparse = read_sparse(model, layers)
    first = sparse.index(True)
    chosen = [f"blk.{layer}.indexer.q_proj.weight" in model.tensors for layer in range(layers)]
    index = {
        "index_n_heads": "head_count",
        "index_head_dim": "key_length",
        "index_topk_blocks": "top_k",
        "index_block_size": "block_size",
        "index_local_blocks": "local_blocks",
    }
    dense = f"blk.{sparse.index(False)}.ffn_up.weight" if False in sparse else ""
    width = model.tensors[dense][1].shape[0] if dense in model.tensors else 1
    return {
        "model_type": "minimax_m3_vl_text",
        "intermediate_size": expert_width(model, layer=first),
        "dense_intermediate_size": width,
        "shared_intermediate_size": expert_width(model, "ffn_up_shexp", first),
        "swiglu_limit": 7.0,
        "routed_scaling_factor": read_expert_scale(model),
        "mlp_layer_types": ["sparse" if each else "dense" for each in sparse],
        "layer_types": ["minimax_m3_sparse" if each else "full_attention" for each in chosen],
    } | read_experts(model, first) | {
        ours: read_count(model, f"attention.indexer.{key}") for ours, key in index.items()
    }  # fmt: skip


def hunyuan_moe(model: GgufModel, values: Values) -> Values:
    """Hunyuan's first mixtures, in which experts and the shared expert have the same width."""
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


def hy_v3(model: GgufModel, values: Values) -> Values:
    """Hunyuan 3. Its tensors show which layers have experts."""
    check_sigmoid(model)
    check_normalised(model)
    layers = read_own_layers(model, values)
    sparse = read_sparse(model, layers)
    return {
        "model_type": "hy_v3",
        "num_hidden_layers": layers,
        "mlp_layer_types": ["sparse" if each else "dense" for each in sparse],
        "router_scaling_factor": read_expert_scale(model),
    } | read_counted_experts(
        model, sparse.index(True), "num_experts", "num_experts_per_tok", "num_shared_experts"
    )


def mimo2(model: GgufModel, values: Values) -> Values:
    """MiMo-V2, in which layers with a window have twice as many KV heads."""
    check_sigmoid(model)
    layers = read_own_layers(model, values)
    windowed = read_by_layer(model, "attention.sliding_window_pattern", layers)
    heads = read_by_layer(model, "attention.head_count_kv", layers)
    own = heads[windowed.index(0)] if 0 in windowed else heads[0] // 2
    if heads != [2 * own if each else own for each in windowed]:
        raise ValueError(f"its {model.architecture}.attention.head_count_kv cannot be {heads}")
    sparse = read_sparse(model, layers)
    layer, part = sparse.index(True), values["partial_rotary_factor"]
    experts = read_experts(model, layer)
    thetas = {
        "full_attention": values.get("rope_theta", 5e6),
        "sliding_attention": model.get("rope.freq_base_swa", 1e4),
    }
    kinds = ["sliding_attention" if each else "full_attention" for each in windowed]
    return {
        "model_type": "mimo_v2_flash",
        "num_hidden_layers": layers,
        "num_key_value_heads": own,
        "v_head_dim": read_count(model, "attention.value_length"),
        "sliding_window": read_count(model, "attention.sliding_window"),
        "layer_types": kinds,
        "mlp_layer_types": ["sparse" if each else "dense" for each in sparse],
        "n_routed_experts": experts["num_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "moe_intermediate_size": expert_width(model, layer=layer),
        "norm_topk_prob": True,
        "routed_scaling_factor": read_expert_scale(model),
        "n_group": read_count(model, "expert_group_count", default=1),
        "topk_group": read_count(model, "expert_group_used_count", default=1),
        "attention_value_scale": read_number(model, "attention.value_scale", 0.707),
        "rope_scaling": None,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": part}
            for kind, theta in thetas.items()
        },
    }


def _balanced(
    model: GgufModel,
    values: Values,
    count: str = "n_routed_experts",
    shared: str = "n_shared_experts",
) -> Values:
    """Return the config of experts whose layers follow dense ones.

    `count`, `shared`: the family's config keys.
    """
    check_sigmoid(model)
    first = read_first_sparse(model, values)
    return {
        "first_k_dense_replace": first,
        "routed_scaling_factor": read_expert_scale(model),
        "norm_topk_prob": bool(model.get("expert_weights_norm", False)),
        "n_group": read_count(model, "expert_group_count", default=1),
        "topk_group": read_count(model, "expert_group_used_count", default=1),
    } | read_counted_experts(model, first, count, "num_experts_per_tok", shared)
