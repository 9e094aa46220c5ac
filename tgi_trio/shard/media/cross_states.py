"""Keys and values of an image for layers with cross-attention, computed once for all tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from tgi_trio.shard.media.features import CrossStates

Inputs = Mapping[str, torch.Tensor]
Keep = Callable[[Any], None]
EncodeStates = Callable[[Any, Inputs, torch.dtype], CrossStates]


def keep_llama(model: Any) -> None:
    """Remove all but projections and norms of keys and values from Llama 3.2 Vision's text."""
    text = model.language_model
    for name in ("embed_tokens", "norm", "rotary_emb"):
        delattr(text, name)
    cross_attention = [getattr(layer, "cross_attn", None) for layer in text.layers]
    text.layers = nn.ModuleList(map(_keep_attention, cross_attention))


def keep_idefics(model: Any) -> None:
    """Do the same for Idefics 1."""
    for name in ("embed_tokens", "layers", "norm"):
        delattr(model, name)
    cross_attention = [layer.cross_attn for layer in model.gated_cross_attn_layers]
    model.gated_cross_attn_layers = nn.ModuleList(map(_keep_attention, cross_attention))


def _keep_attention(attention: Any) -> nn.Module:
    """Return a layer with the projections of keys and values only; None: an empty layer."""
    kept = nn.Module()
    if attention is not None:
        for name in ("q_proj", "o_proj", "q_norm", "q_layer_norm", "rotary_emb"):
            if hasattr(attention, name):
                delattr(attention, name)
        kept.cross_attn = attention
    return kept


def encode_llama_states(model: Any, inputs: Inputs, dtype: torch.dtype) -> CrossStates:
    """Return the keys and values of one image in Llama 3.2 Vision, from its `inputs`."""
    mask = inputs["aspect_ratio_mask"]
    # Tiles of padding must be 0 after the normalisation; before it they are black.
    pixels = inputs["pixel_values"] * mask[..., None, None, None]
    found = model.vision_model(**{**inputs, "pixel_values": pixels}).last_hidden_state
    states = model.multi_modal_projector(found).flatten(0, -2)
    cross_attention = [
        own.cross_attn for own in model.language_model.layers if hasattr(own, "cross_attn")
    ]
    shape = (len(states), -1, cross_attention[0].head_dim)
    return CrossStates(
        keys=_bring_down(
            [own.k_norm(own.k_proj(states).view(shape)) for own in cross_attention], dtype
        ),
        values=_bring_down([own.v_proj(states).view(shape) for own in cross_attention], dtype),
        tokens=len(states),
        visible=int(mask.sum()) * found.shape[-2],
    )


def encode_idefics_states(model: Any, inputs: Inputs, dtype: torch.dtype) -> CrossStates:
    """Return the keys and values of one image in Idefics 1, from its `inputs`."""
    states = model.vision_model(**inputs).last_hidden_state
    if model.config.use_resampler:
        states = model.perceiver_resampler(states)
    states = states.flatten(0, -2)
    cross_attention = [own.cross_attn for own in model.gated_cross_attn_layers]
    shape = (len(states), -1, cross_attention[0].head_dim)
    keys = [own.k_proj(states).view(shape) for own in cross_attention]
    if cross_attention[0].qk_layer_norms:
        keys = [own.k_layer_norm(key) for own, key in zip(cross_attention, keys, strict=True)]
    return CrossStates(
        keys=_bring_down(keys, dtype),
        values=_bring_down([own.v_proj(states).view(shape) for own in cross_attention], dtype),
        tokens=len(states),
        visible=len(states),
    )


def _bring_down(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return tuple(part.to("cpu", dtype) for part in parts)


# By `model_type`: removes the text model's other parts, and computes keys and values.
CROSS_STATES: Final[Mapping[str, tuple[Keep, EncodeStates]]] = {
    "idefics": (keep_idefics, encode_idefics_states),
    "mllama": (keep_llama, encode_llama_states),
}
