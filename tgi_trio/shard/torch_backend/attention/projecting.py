"""Rotating a layer's queries and keys, and writing K and V to the cache, in one launch."""

from __future__ import annotations

from typing import Final

import torch

from tgi_trio.shard.torch_backend.attention.tiles import pad_dim
from tgi_trio.shard.torch_backend.kernels.fused import rotate_and_write, write_latents
from tgi_trio.shard.torch_backend.layers.heads import HeadSteps, RotaryTable
from tgi_trio.shard.torch_backend.layers.latent import LatentProjections
from tgi_trio.shard.torch_backend.layers.rotary import Rotary
from tgi_trio.shard.torch_backend.torch_device import overlap

_ELEMENTS: Final = 2048  # of a program of four warps: twice 16 numbers a thread


def write_projected(
    qkv: torch.Tensor,
    steps: HeadSteps,
    table: RotaryTable | None,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    *,
    scales: tuple[float, float] = (1.0, 1.0),
    codes: str = "",
) -> torch.Tensor:
    """Return queries [T, heads, head_dim]; write keys and values to their slots.

    `qkv`: [T, all heads * head_dim], with contiguous rows; `key`, `value`: [slots, kv_heads,
    head_dim], one layer of the cache, in the format `codes` with `scales` of K and V; `slots`:
    int64 [T].
    """
    heads, kv_heads, dim = steps.heads, steps.kv_heads, steps.head_dim
    rotary = steps.rotary if table is not None else None
    still = rotary is None and steps.gain is None and not steps.clip
    if still:  # nothing happens to queries, and the kernel does not copy them
        query = qkv.view(len(qkv), -1, dim)[:, :heads]
    else:
        query = torch.empty((len(qkv), heads, dim), dtype=qkv.dtype, device=qkv.device)
    turns = rotary is not None and table is not None
    cos, sin = (table.cos, table.sin) if turns and table is not None else (qkv, qkv)
    first = heads if still else 0
    block = count_heads(dim)
    rotate_and_write[(len(qkv), -(-(heads + 2 * kv_heads - first) // block))](
        query,
        key,
        value,
        qkv,
        cos,
        sin,
        slots,
        qkv if steps.gain is None else steps.gain,
        qkv if steps.bias is None else steps.bias,
        steps.eps,
        steps.clip,
        *scales,
        qkv.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        PADDED_DIM=pad_dim(dim),
        ROTARY=0 if rotary is None else rotary.spec.dim,
        INTERLEAVED=rotary is not None and rotary.spec.interleaved,
        CLIPS=steps.clip > 0,
        NORM="" if steps.gain is None else steps.norm,
        HAS_BIAS=steps.bias is not None,
        CODES=codes,
        FIRST=first,
        BLOCK=block,
        **overlap(qkv.device),
    )
    return query


def write_latent_keys(
    projected: torch.Tensor,
    latent: LatentProjections,
    rotary: Rotary,
    table: RotaryTable,
    key: torch.Tensor,
    slots: torch.Tensor,
    *,
    scale: float = 1.0,
    codes: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries [T, heads, rank] and their ends [T, heads, rotary_dim], not rotated yet.

    Writes keys to their slots. `projected`: [T, ...] as for `LatentProjections`, with contiguous
    rows; `key`: [slots, 1, rank + rotary_dim], one layer of the cache, in the format `codes` with a
    `scale`; `slots`: int64 [T].
    """
    spec, norm = latent.spec, latent.latent_norm
    inner = latent.query_norm or norm  # unused if queries are not compressed
    tokens, width = len(projected), projected.shape[1] - spec.rank - spec.rotary_dim
    query = projected[:, :width]
    if latent.query_up is not None:
        query = torch.empty((tokens, width), dtype=projected.dtype, device=projected.device)
    write_latents[(tokens, 1 if latent.query_up is None else 2)](
        key,
        query,
        projected,
        table.cos,
        table.sin,
        slots,
        projected if norm.weight is None else norm.weight,
        projected if norm.bias is None else norm.bias,
        projected if inner.weight is None else inner.weight,
        projected if inner.bias is None else inner.bias,
        norm.eps,
        inner.eps,
        scale,
        projected.stride(0),
        QUERY=width,
        PADDED_QUERY=pad_dim(width),
        RANK=spec.rank,
        PADDED_RANK=pad_dim(spec.rank),
        ROTARY=spec.rotary_dim,
        PADDED_ROTARY=pad_dim(spec.rotary_dim),
        INTERLEAVED=rotary.spec.interleaved,
        KIND=norm.kind,
        HAS_GAIN=norm.weight is not None,
        HAS_BIAS=norm.bias is not None,
        CODES=codes,
    )
    if latent.query_up is not None:
        query = latent.query_up(query)
    query = query.view(tokens, len(latent.key_up), spec.plain_dim + spec.rotary_dim)
    plain, ends = query.split((spec.plain_dim, spec.rotary_dim), dim=-1)
    absorbed = torch.empty(
        (*query.shape[:2], spec.rank), dtype=projected.dtype, device=projected.device
    )
    torch.bmm(plain.transpose(0, 1), latent.key_up, out=absorbed.transpose(0, 1))
    return absorbed, ends


def count_heads(head_dim: int) -> int:
    """Return the heads that a program has."""
    return max(1, _ELEMENTS // pad_dim(head_dim))
