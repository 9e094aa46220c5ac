"""Families in which some layers have cross-attention to images, and no self-attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families import names
from tgi_trio.model.families.llama_like import llama_spec
from tgi_trio.model.reading import rotary
from tgi_trio.model.specs.decoder import CrossAttentionSpec, DecoderSpec, LayerSpec
from tgi_trio.model.wrappers import EXTRA_TOKENS

_LLAMA_LAYERS: Final = (3, 8, 13, 18, 23, 28, 33, 38)


def mllama(config: ModelConfig) -> DecoderSpec:
    """The text of Llama 3.2 Vision."""
    hidden, heads = int(config.need("hidden_size")), int(config.need("num_attention_heads"))
    spec = llama_spec(
        config,
        rotary_spec=rotary(config, hidden // heads, theta=500000.0),
        norm_eps=float(config.get("rms_norm_eps", 1e-5)),
        extra_tokens=EXTRA_TOKENS["mllama_text_model"],
    )
    cross_attention = LayerSpec(
        scale=spec.head_dim**-0.5,
        attends=False,
        cross_attention=CrossAttentionSpec(
            "reads all", together=True, gate_shape=(1,), query_norm=True
        ),
        names=names.LLAMA_CROSSING,
    )
    which = {int(i) for i in config.get("cross_attention_layers", _LLAMA_LAYERS)}
    layers = (cross_attention if i in which else layer for i, layer in enumerate(spec.layers))
    return replace(spec, layers=tuple(layers))


def idefics(config: ModelConfig) -> DecoderSpec | None:
    """The text of Idefics 1: a cross-attention layer before every n-th layer of the text."""
    heads, hidden = int(config.need("num_attention_heads")), int(config.need("hidden_size"))
    gates = {"float": (1,), "vector": (1, 1, hidden)}.get(config.get("alpha_type", "float"))
    if gates is None:
        return None
    normed = bool(config.get("qk_layer_norms", False))
    cross_attention = LayerSpec(
        scale=(hidden // heads) ** -0.5,
        attends=False,
        cross_attention=CrossAttentionSpec(
            "feeds",
            together=False,
            gate_shape=gates,
            query_norm=normed,
        ),
    )
    spec = llama_spec(
        config,
        names=names.IDEFICS,
        kv_heads=heads,
        added_tokens=int(config.get("additional_vocab_size", 0)),
    )
    every = int(config.get("cross_layer_interval", 1))
    layers: list[LayerSpec] = []
    for i, layer in enumerate(spec.layers):
        if i % every == 0:
            place = names.IDEFICS_CROSSING.layer.format(i // every)
            layers.append(
                replace(cross_attention, names=replace(names.IDEFICS_CROSSING, layer=place))
            )
        own = replace(names.IDEFICS, layer=names.IDEFICS.layer.format(i))
        layers.append(replace(layer, names=own))
    return replace(spec, layers=tuple(layers))
