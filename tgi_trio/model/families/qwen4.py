"""Qwen 4: linear attention, blocks chosen by an index, gated hidden states, n-gram embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families import names
from tgi_trio.model.families.checkpoint_traits import is_stored
from tgi_trio.model.families.linear_attention import delta_rule, set_mixers
from tgi_trio.model.families.llama_like import attention_bias, llama_spec
from tgi_trio.model.families.mixtures import set_qwen_experts
from tgi_trio.model.matrices.ngrams import TABLE
from tgi_trio.model.reading import rotary, with_sections
from tgi_trio.model.specs.decoder import DecoderSpec, LayerSpec
from tgi_trio.model.specs.gated_streams import GatedStreamsSpec
from tgi_trio.model.specs.ngrams import NgramsSpec, draw_factors, find_primes
from tgi_trio.model.specs.pooled_index import PooledIndexSpec

# Defaults of the mixtures' numbers.
_EXPERTS: Final = {
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
}
_ATTENDS: Final = ("indexed_attention", "full_attention")  # two names of the same


def qwen4_exp(config: ModelConfig) -> DecoderSpec | None:
    """Qwen 4's text: three of four layers have linear attention; all are mixtures of experts.

    None where index keys would turn by the length of a sequence, and for a convolution with another
    activation than SiLU.
    """
    values = {name: value for name, value in config.values.items() if value is not None}
    stated = {"intermediate_size": 0}  # there is no dense MLP
    stated["num_experts"] = config.get("num_experts", config.get("num_local_experts", 512))
    config = replace(config, values={**_EXPERTS, **values, **stated})
    head_dim = int(config.get("head_dim", 256))
    rotary_spec = with_sections(rotary(config, head_dim), (11, 11, 10), alternate=True)
    if rotary_spec.kind in ("dynamic", "longrope") or config.get("hidden_act", "silu") != "silu":
        return None
    spec = llama_spec(
        config,
        head_dim=head_dim,
        rotary_spec=rotary_spec,
        names=names.QWEN4,
        norm="rms_plus_one",
        query_key_norm="head",
        gated_attention=True,
        **attention_bias(config),
    )
    mixer = delta_rule(config, spec, "stacked", gate=config.get("output_gate_type", "silu"))
    kinds = _kinds(config)
    spec = set_mixers(spec, mixer, kinds)
    width = int(config.get("shared_expert_intermediate_size", 512))
    spec = _add_index(config, set_qwen_experts(config, spec, width))
    streams = GatedStreamsSpec(int(config.get("hc_count", 4)), int(config.get("hc_lowrank", 320)))
    return replace(
        spec,
        layers=_add_ngrams(config, spec, streams.count * spec.hidden_size),
        mtp=_make_mtp_layer(config, spec),
        gated_streams=streams,
    )


def _kinds(config: ModelConfig) -> list[str]:
    """Return the kind of each layer; by default, the last of every four has attention."""
    every = int(config.get("full_attention_interval", 4))
    count = int(config.need("num_hidden_layers"))
    default = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(count)]
    kinds = config.get("layer_types", default)
    return ["full_attention" if kind in _ATTENDS else kind for kind in kinds]


def _add_index(config: ModelConfig, spec: DecoderSpec) -> DecoderSpec:
    """Return the spec with an index in every layer that attends."""
    index = _index(config) if any(layer.attends for layer in spec.layers) else None
    layers = (replace(layer, pooled=index) if layer.attends else layer for layer in spec.layers)
    return replace(spec, layers=tuple(layers))


def _index(config: ModelConfig) -> PooledIndexSpec:
    """Return the index; raises ModelLoadError if config.json has none, ValueError for a wrong one.

    It rotates as many numbers as attention does.
    """
    if int(config.need("indexer_kv_heads")) != 1:
        raise ValueError("indexer_kv_heads is not 1")
    budget = int(config.need("indexer_budget"))
    size = int(config.need("indexer_compress_ratio"))
    if size < 1 or budget < size or budget % size:
        raise ValueError(f"indexer_budget is {budget}, which is no multiple of {size} tokens")
    return PooledIndexSpec(
        heads=int(config.need("indexer_n_heads")),
        dim=int(config.need("indexer_head_dim")),
        size=size,
        most=budget // size,
    )


def _make_mtp_layer(config: ModelConfig, spec: DecoderSpec) -> tuple[LayerSpec, ...]:
    """Return the layer that drafts tokens ahead, which attends and has no n-grams.

    () where config.json says what no published one does: that it embeds tokens by itself, reads an
    earlier layer's states, or turns by another base.
    """
    own = dict(config.get("mtp") or {})
    attending = [layer for layer in spec.layers if layer.attends]
    odd = bool(set(own.get("layer_types") or ()) - {*_ATTENDS, "qwen_sparse_attention"})
    odd |= bool(config.get("mtp_use_dedicated_embeddings"))
    odd |= own.get("mtp_use_hidden_state_from_layer") is not None
    if odd or not attending or attending[-1].rotary is None:
        return ()
    base = own.get("rope_theta", attending[-1].rotary.theta)
    count = int(config.get("mtp_num_hidden_layers", own.get("num_hidden_layers", 1)))
    return tuple(attending[-1:]) if count == 1 and base == attending[-1].rotary.theta else ()


def _add_ngrams(config: ModelConfig, spec: DecoderSpec, channels: int) -> tuple[LayerSpec, ...]:
    """Return the layers, with n-grams in those that config.json numbers from one.

    Raises ValueError for layers without linear attention, and where no token ends a text.
    """
    layers = list(spec.layers)
    for number, index in enumerate(sorted(set(config.get("ple_layer_ids", ())))):
        if not 0 < index <= len(layers) or layers[index - 1].mixer is None:
            raise ValueError(f"ple_layer_ids has {index}, which is no layer of linear attention")
        ngrams = _ngrams(config, spec, channels, number)
        if is_stored(config, spec.names, index - 1, f"{spec.names.ngrams}.{TABLE}.weight"):
            ngrams = replace(ngrams, parts=0)
        layers[index - 1] = replace(layers[index - 1], ngrams=ngrams)
    return tuple(layers)


def _ngrams(config: ModelConfig, spec: DecoderSpec, channels: int, number: int) -> NgramsSpec:
    """Return the n-grams of layer `number` among those that have some."""
    order = int(config.get("ngram_size", 3))
    heads = (order - 1) * int(config.get("heads_per_ngram", 8))
    width = int(config.get("ple_embed_dim", spec.hidden_size))
    if heads < 1 or width % heads:
        raise ValueError(f"ple_embed_dim is {width}, which {heads} heads do not divide")
    rows = find_primes(int(config.get("ngram_vocab_size_base", 20_000_000)), number * heads, heads)
    unit = int(config.get("make_ngram_vocab_size_divisible_by", 128))
    return NgramsSpec(
        order=order,
        factors=draw_factors(spec.vocab_size, order, number, int(config.get("seed", 1234))),
        rows=rows,
        table_rows=-(-sum(rows) // unit) * unit,
        parts=int(config.get("split_ngram_parts", 512)),
        width=width,
        taps=int(config.get("ple_conv_kernel_size", 4)),
        end=_end(config),
        channels=channels,
    )


def _end(config: ModelConfig) -> int:
    """Return the token that n-grams do not reach over: the first that the text's config names."""
    nested = config.values.get("text_config")
    stated: Mapping[str, Any] = nested if isinstance(nested, dict) else config.values
    ends = stated.get("eos_token_id")
    if isinstance(ends, list):
        ends = ends[0] if ends else None
    if ends is None:
        raise ValueError("there are n-grams, and no eos_token_id")
    return int(ends)
