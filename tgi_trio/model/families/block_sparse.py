"""Attention to blocks of tokens that an index chooses: MiniMax-M3."""

from __future__ import annotations

from dataclasses import replace

from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families import names
from tgi_trio.model.families.checkpoint_traits import choose_names
from tgi_trio.model.families.llama_like import llama_spec
from tgi_trio.model.reading import rotary
from tgi_trio.model.specs.block_index import BlockIndexSpec
from tgi_trio.model.specs.decoder import DecoderSpec, ExpertsSpec, LayerSpec

_ALPHA = 1.702  # of "quick_gelu"
_SPARSE = "minimax_m3_sparse"  # in `layer_types`


def minimax_m3(config: ModelConfig) -> DecoderSpec | None:
    """MiniMax-M3 (2026): gates as gpt-oss has them, norms stored less one.

    None for other gates, and for an index whose heads are not those of K and V, are rotated only in
    part of what rotates, or that is to choose more of the last blocks than of all.
    """
    limit, kv_heads = float(config.get("swiglu_limit", 7.0)), config.get("num_key_value_heads", 4)
    head_dim = int(config.get("head_dim", 128))
    rotary_spec = rotary(config, head_dim, theta=5000000.0)
    index, heads = _index(config)
    odd = heads != kv_heads or index.dim < rotary_spec.dim or index.local > index.most
    odd |= min(index.most, index.size) < 1
    if float(config.get("swiglu_alpha", _ALPHA)) != _ALPHA or limit <= 0.0 or odd:
        return None
    spec = llama_spec(
        config,
        head_dim=head_dim,
        rotary_spec=rotary_spec,
        norm="rms_plus_one",
        names=choose_names(
            config,
            {"block_sparse_moe": names.MINIMAX_M3, "gate_up_proj": names.MINIMAX_M3_TEXT},
        ),
        query_key_norm="head",
        activation="quick_gelu",
        mlp_width=int(config.get("dense_intermediate_size", 12288)),
        mlp_limit=limit,
    )
    experts = ExpertsSpec(
        count=int(config.get("num_local_experts", config.get("num_experts", 128))),
        per_token=int(config.get("num_experts_per_tok", 4)),
        width=int(config.get("intermediate_size", 3072)),
        normalise=True,
        shared_width=int(config.get("shared_intermediate_size", 3072)),
        routing="grouped-sigmoid",
        scale=float(config.get("routed_scaling_factor", 2.0)),
        limit=limit,
    )
    sparse, chosen = _kinds(config, len(spec.layers))

    def kind(layer: LayerSpec, mixes: bool, chooses: bool) -> LayerSpec:
        return replace(layer, experts=experts if mixes else None, blocks=index if chooses else None)

    layers = map(kind, spec.layers, sparse, chosen)
    return replace(spec, layers=tuple(layers))


def _index(config: ModelConfig) -> tuple[BlockIndexSpec, int]:
    """Return the index, and its number of heads; published files have it in a table."""
    table = config.get("sparse_attention_config", {})

    def number(name: str, published: str, default: int) -> int:
        return int(table.get(published, config.get(name, default)))

    index = BlockIndexSpec(
        dim=number("index_head_dim", "sparse_index_dim", 128),
        size=number("index_block_size", "sparse_block_size", 128),
        most=number("index_topk_blocks", "sparse_topk_blocks", 16),
        local=number("index_local_blocks", "sparse_local_block", 1),
    )
    return index, number("index_n_heads", "sparse_num_index_heads", 4)


def _kinds(config: ModelConfig, count: int) -> tuple[list[bool], list[bool]]:
    """Return which layers are mixtures, and which have an index."""
    mlps, attentions = config.get("mlp_layer_types"), config.get("layer_types")
    sparse = [True] * count
    if mlps or config.get("moe_layer_freq"):
        sparse = [kind in ("sparse", 1) for kind in mlps or config.need("moe_layer_freq")]
    chosen = config.get("sparse_attention_config", {}).get("sparse_attention_freq", [0] * count)
    if attentions:
        chosen = [kind == _SPARSE for kind in attentions]
    return sparse, [bool(own) for own in chosen]
