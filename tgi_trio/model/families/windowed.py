"""Mixtures most of whose layers have a window; the others see everything, without positions.

Source: Cohere's Command R7B (2024) for the alternation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families import names
from tgi_trio.model.families.balanced import set_sparse
from tgi_trio.model.families.llama_like import attention_bias, llama_spec
from tgi_trio.model.reading import rotary, windows_by_kind
from tgi_trio.model.specs.decoder import DecoderSpec, ExpertsSpec, Names

_FULL, _SLIDING = "full_attention", "sliding_attention"


def cohere2_moe(config: ModelConfig) -> DecoderSpec | None:
    """Command A+ (Cohere 2026): experts in parallel to attention; the first layers may be dense."""
    joins, chooses = (
        config.get("shared_expert_combination_strategy", "average"),
        config.get("expert_selection_fn", "softmax"),
    )
    if joins not in ("average", "sum") or chooses not in ("softmax", "sigmoid"):
        return None
    head_dim, width = int(config.get("head_dim", 128)), int(config.get("intermediate_size", 22528))
    eps, shared = config.get("rms_norm_eps"), int(config.get("num_shared_experts", 0))
    first, count = (
        int(config.get("first_k_dense_replace", 0)),
        int(config.need("num_hidden_layers")),
    )
    spec = llama_spec(
        config,
        head_dim=head_dim,
        windows=_cohere_windows(config, first, count),
        rotary_spec=rotary(config, head_dim, interleaved=True),
        names=names.COHERE2_MOE,
        norm="rms" if eps else "layer",
        norm_eps=float(eps or config.get("layer_norm_eps", 1e-5)),
        parallel=True,
        logit_scale=float(config.get("logit_scale", 0.0625)),
        tied_head=bool(config.get("tie_word_embeddings", True)),
        **attention_bias(config),
    )
    experts = ExpertsSpec(
        count=int(config.get("num_experts", 8)),
        per_token=int(config.get("num_experts_per_tok", 2)),
        width=width,
        # softmax over the chosen experts, which is their normalised share of that over all
        normalise=chooses == "softmax" or bool(config.get("norm_topk_prob", True)),
        shared_width=width * shared,
        routing=chooses,
        result_scale=0.5 if shared and joins == "average" else 1.0,
    )
    kinds = config.get("mlp_layer_types") or ["dense"] * first + ["sparse"] * (count - first)
    dense_turns = int(config.get("prefix_dense_sliding_window_pattern", 1)) == 1
    dense_width = int(config.get("prefix_dense_intermediate_size", width))
    layers = (
        replace(
            la,
            rotary=la.rotary if la.window or (kind == "dense" and dense_turns) else None,
            experts=experts if kind != "dense" else None,
            mlp_width=dense_width if kind == "dense" else 0,
        )
        for la, kind in zip(spec.layers, kinds, strict=True)
    )
    return replace(spec, layers=tuple(layers))


def _cohere_windows(config: ModelConfig, first: int, count: int) -> list[int]:
    """Return each layer's window; the `first` layers, dense ones, have a pattern of their own."""
    window, kinds = int(config.get("sliding_window", 4096)), config.get("layer_types")
    if kinds:
        return windows_by_kind(kinds, window)
    dense = int(config.get("prefix_dense_sliding_window_pattern", 1))
    every = int(config.get("sliding_window_pattern", 4))
    before = [window if (i + 1) % dense else 0 for i in range(first)]
    return before + [window if (i + 1) % every else 0 for i in range(count - first)]


def afmoe(config: ModelConfig) -> DecoderSpec:
    """Trinity (Arcee 2025): a gate for each number that heads say, and norms around each part."""
    every = int(config.get("global_attn_every_n_layers", 4))
    count, hidden = int(config.need("num_hidden_layers")), int(config.need("hidden_size"))
    width = int(config.get("moe_intermediate_size", 1408))
    spec = _normed_heads(
        config,
        names.AFMOE,
        [(i + 1) % every > 0 for i in range(count)],
        window=1024,
        gated_attention=True,
        embedding_scale=hidden**0.5 if config.get("mup_enabled", False) else 1.0,
        norm_eps=float(config.get("rms_norm_eps", 1e-5)),
        **attention_bias(config),
    )
    experts = ExpertsSpec(
        count=int(config.get("num_experts", 64)),
        per_token=int(config.get("num_experts_per_tok", 6)),
        width=width,
        normalise=True,
        shared_width=width * int(config.get("num_shared_experts", 2)),
        routing="grouped-sigmoid",
        scale=float(config.get("route_scale", 1.0)),
    )
    first = int(config.get("num_dense_layers", 1))
    return set_sparse(spec, experts, [i >= first for i in range(count)])


def kolibri1(config: ModelConfig) -> DecoderSpec:
    """Kolibri 1 (Aleph Alpha 2026): experts chosen by biased logits, weighted by sigmoids."""
    every_fifth = [(i + 1) % 5 > 0 for i in range(int(config.need("num_hidden_layers")))]
    width = int(config.get("moe_intermediate_size", 512))
    spec = _normed_heads(config, names.KOLIBRI1, every_fifth, mlp_width=width)
    experts = ExpertsSpec(
        count=int(config.get("num_local_experts", config.get("num_experts", 384))),
        per_token=int(config.get("num_experts_per_tok", 6)),
        width=width,
        normalise=bool(config.get("norm_topk_prob", False)),
        shared_width=int(config.get("shared_expert_intermediate_size", 512)),
        routing="sigmoid",
    )
    return set_sparse(spec, experts, [True] * len(spec.layers))


def flint(config: ModelConfig) -> DecoderSpec:
    """Flint (Recursive 2026): sinks, and experts weighted by sigmoids."""
    count, dense = int(config.need("num_hidden_layers")), config.get("mlp_only_layers", [0, 1])
    full = {0, *range(1, count, 4), count - 1}
    spec = _normed_heads(
        config, names.FLINT, [i not in full for i in range(count)], **attention_bias(config)
    )
    experts = ExpertsSpec(
        count=int(config.get("num_experts", 256)),
        per_token=int(config.get("num_experts_per_tok", 6)),
        width=int(config.get("moe_intermediate_size", 512)),
        normalise=bool(config.get("norm_topk_prob", True)),
        shared_width=int(config.get("shared_expert_intermediate_size", 1024)),
        routing="sigmoid",
    )
    every = int(config.get("decoder_sparse_step", 1))
    return set_sparse(
        spec, experts, [i not in dense and (i + 1) % every == 0 for i in range(count)]
    )


def _normed_heads(
    config: ModelConfig, own: Names, windowed: list[bool], *, window: int = 513, **changes: Any
) -> DecoderSpec:
    """Return the spec of a model that normalises heads and turns those of layers with a window.

    `windowed`: which layers have one by default; `changes`: as for `llama_spec`.
    """
    kinds = config.get("layer_types") or [_SLIDING if own else _FULL for own in windowed]
    window = int(config.get("sliding_window", window))
    spec = llama_spec(
        config,
        head_dim=128,
        windows=windows_by_kind(kinds, window),
        names=own,
        query_key_norm="head",
        **changes,
    )
    layers = (la if la.window else replace(la, rotary=None) for la in spec.layers)
    return replace(spec, layers=tuple(layers))
