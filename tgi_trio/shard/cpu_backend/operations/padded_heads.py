"""Padding of heads that do not fill whole panels, and the operations around their attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.model.specs.decoder import DecoderSpec, HeadSizes, LayerSpec
from tgi_trio.shard.cpu_backend.head_order import head_order, needs_order
from tgi_trio.shard.cpu_backend.operations.mixtures import pad_to_panel
from tgi_trio.shard.cpu_backend.operations.writer import OperationWriter
from tgi_trio.shard.cpu_backend.tables import PADDING, Buffer, Code, Form


def kept_sizes(spec: DecoderSpec, layer: LayerSpec) -> HeadSizes:
    """Return the padded sizes of a layer's heads, in attention and in the cache: whole panels.

    Of latents without the key of an index, which is kept apart.
    """
    own, latent = spec.sizes(layer), spec.latent_of(layer)
    if latent is not None:
        size = latent.rank + latent.rotary_dim
        own = replace(own, dim=size, value_dim=size)
    return replace(own, dim=pad_to_panel(own.dim), value_dim=pad_to_panel(own.value_dim))


def is_padded(spec: DecoderSpec, layer: LayerSpec) -> bool:
    """Return whether a layer's heads are padded."""
    return spec.latent_of(layer) is None and kept_sizes(spec, layer) != spec.sizes(layer)


def add_padding(
    writer: OperationWriter, spec: DecoderSpec, layer: LayerSpec, width: int
) -> NDArray[np.int32] | None:
    """Add the padding of heads in rows of QKV, `width` numbers each.

    Return the order that queries and keys then have, None for the model's; -1 stands for a zero.
    """
    own, kept = spec.sizes(layer), kept_sizes(spec, layer)
    order = None
    if layer.rotary is not None and needs_order(layer.rotary):
        order = head_order(layer.rotary, kept.dim)
        order[order >= own.dim] = -1
    facts = _facts(spec, layer)
    facts["queries"] = own.heads + (own.kv_heads if layer.reads_layer is None else 0)
    if layer.reads_layer is None and not layer.keys_as_values:
        facts["values"] = own.kv_heads
    writer.add(
        Code.PAD,
        target=Buffer.QKV,
        width=width,
        order=writer.keep(order),
        facts=writer.keep(facts),
        head_dim=kept.dim,
        value_dim=kept.value_dim,
    )
    return order


def close_heads(writer: OperationWriter, spec: DecoderSpec, layer: LayerSpec) -> Buffer:
    """Add the removal of padding from attention's output; return the buffer of the result."""
    own = spec.sizes(layer)
    writer.rows[-1]["forms"] |= Form.WIDE
    writer.add(
        Code.CLOSE,
        source=Buffer.ATTENDED,
        target=Buffer.MIXED,
        width=own.heads * own.value_dim,
        heads=own.heads,
        facts=writer.keep(_facts(spec, layer)),
        value_dim=kept_sizes(spec, layer).value_dim,
    )
    return Buffer.MIXED


def pad_gain(
    gain: NDArray[np.float32], order: NDArray[np.int32] | None, size: int
) -> NDArray[np.float32]:
    """Return the weights of a norm over `size` numbers, all zeros but those of `gain`.

    Padding lowers the mean square, which the weights make up for; `eps` has to be scaled alike.
    """
    gain = gain * np.float32((len(gain) / size) ** 0.5)
    if order is None:
        return np.pad(gain, (0, size - len(gain)))
    return np.where(order < 0, np.float32(0.0), gain[order])


def _facts(spec: DecoderSpec, layer: LayerSpec) -> NDArray[Any]:
    facts, own = np.zeros((1,), PADDING), spec.sizes(layer)
    facts["dim"], facts["value_dim"] = own.dim, own.value_dim
    return facts
