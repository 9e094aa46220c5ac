"""The attention backends of every kind of model: in plain torch, and in kernels of ours.

A kind whose attention has kernels is a row with two functions; those of the others run in plain
torch on any device, launch by launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch

from tgi_trio.shard.torch_backend.attention.choice import capturable_attention, choose_attention
from tgi_trio.shard.torch_backend.attention.entries.reference_entries import (
    EntriesAttention,
    LayerKind,
)
from tgi_trio.shard.torch_backend.attention.indexed.reference_blocks import BlocksAttention
from tgi_trio.shard.torch_backend.attention.indexed.reference_pooled import PooledAttention
from tgi_trio.shard.torch_backend.attention.indexed.reference_tokens import IndexedAttention
from tgi_trio.shard.torch_backend.attention.interface import (
    AttentionBackend,
    AttentionKind,
    AttentionNeeds,
    CapturableAttention,
)
from tgi_trio.shard.torch_backend.attention.paged.tiles import (
    fits_entries,
    fits_index,
    fits_kernels,
    fits_latents,
)
from tgi_trio.shard.torch_backend.kv_cache import KVShape
from tgi_trio.shard.torch_backend.torch_device import runs_kernels

# Returns kernels for a model on a device, `invariant` or not.
Paged = Callable[[AttentionNeeds, torch.device, bool], CapturableAttention | None]


class _Backends(NamedTuple):
    """What makes the backends of a kind of attention."""

    plain: Callable[[AttentionNeeds, torch.device], AttentionBackend]
    # Imports Triton. None, or if it returns None for a model's sizes: there are no kernels.
    paged: Paged | None = None


def _entries(needs: AttentionNeeds, device: torch.device) -> EntriesAttention:
    return EntriesAttention((LayerKind.of(*layer) for layer in needs.layers), device)


def _paged_indexed(
    needs: AttentionNeeds, device: torch.device, invariant: bool
) -> CapturableAttention | None:
    if not fits_latents(needs.rank):
        return None
    from tgi_trio.shard.torch_backend.attention.indexed.paged_tokens import PagedIndexedAttention

    return PagedIndexedAttention(device, invariant=invariant)


def _paged_entries(
    needs: AttentionNeeds, device: torch.device, invariant: bool
) -> CapturableAttention | None:
    if not fits_entries(needs.shape):
        return None
    from tgi_trio.shard.torch_backend.attention.entries.paged_entries import PagedEntriesAttention

    return PagedEntriesAttention(device, invariant=invariant)


def _fit(shape: KVShape) -> bool:
    """Return whether kernels hold a cache: its heads, and index keys, which have no values."""
    sizes = shape.by_layer()
    heads = [size for size in sizes if size.value_dim]
    index = (size.key_dim for size in sizes if not size.value_dim)
    return fits_kernels(KVShape.of(heads)) and all(map(fits_index, index))


def _blocks(
    needs: AttentionNeeds, device: torch.device, invariant: bool
) -> CapturableAttention | None:
    from tgi_trio.shard.torch_backend.attention.indexed.paged_blocks import PagedBlocks

    return PagedBlocks(device, invariant=invariant) if _fit(needs.shape) else None


def _pooled(
    needs: AttentionNeeds, device: torch.device, invariant: bool
) -> CapturableAttention | None:
    from tgi_trio.shard.torch_backend.attention.indexed.paged_pooled import PagedPooled

    return PagedPooled(device, invariant=invariant) if _fit(needs.shape) else None


_KINDS: Final[dict[AttentionKind, _Backends]] = {  # all but "all"
    "tokens": _Backends(lambda *_: IndexedAttention(), _paged_indexed),
    "blocks": _Backends(lambda *_: BlocksAttention(), _blocks),
    "pooled": _Backends(lambda *_: PooledAttention(), _pooled),
    "entries": _Backends(_entries, _paged_entries),
}


def make_attention(
    needs: AttentionNeeds,
    device: torch.device,
    dtype: torch.dtype,
    *,
    eight_bits: bool = False,
    invariant: bool = False,
) -> AttentionBackend:
    """Return what computes a model's attention; see `choose_attention` for the rest.

    Plain torch is never `invariant`: with it a model is refused that is to be
    (`loading/invariance.py`).
    """
    if needs.kind == "all":
        return choose_attention(
            device, dtype, needs.shape, eight_bits=eight_bits, invariant=invariant
        )
    found = make_capturable(needs, device, invariant=invariant)
    return found or _KINDS[needs.kind].plain(needs, device)


def make_capturable(
    needs: AttentionNeeds, device: torch.device, *, invariant: bool = False
) -> CapturableAttention | None:
    """Return a backend of its own for steps that are recorded; None: they cannot be."""
    if needs.kind == "all":
        return capturable_attention(device, needs.shape, invariant=invariant)
    paged = _KINDS[needs.kind].paged
    return None if paged is None or not runs_kernels(device) else paged(needs, device, invariant)
