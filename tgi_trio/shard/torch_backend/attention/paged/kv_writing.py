"""Rotating a layer's queries and keys, and writing K and V to the cache, in one launch."""

from __future__ import annotations

from typing import Any, Final

import torch

from tgi_trio.shard.torch_backend.attention.paged.tiles import pad_dim
from tgi_trio.shard.torch_backend.kernels.attention.latents import write_latents
from tgi_trio.shard.torch_backend.kernels.attention.rotating import rotate_and_write
from tgi_trio.shard.torch_backend.layers.attention.beside_heads import BesideHeads, HeadLaunch
from tgi_trio.shard.torch_backend.layers.attention.heads import HeadSteps
from tgi_trio.shard.torch_backend.layers.attention.latent import LatentProjections
from tgi_trio.shard.torch_backend.layers.attention.rotary import Rotary, RotaryTable
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
    beside: BesideHeads | None = None,
) -> torch.Tensor:
    """Return queries [T, heads, head_dim]; write keys and values to their slots.

    `qkv`: [T, width], with contiguous rows, as for `HeadSteps.split`; `key`, `value`: [slots,
    kv_heads, their numbers], one layer of the cache, in the format `codes` with `scales` of K and
    V; `slots`: int64 [T]. What is `beside` heads is computed as well.
    """
    launch = prepare_heads(qkv, steps, table, key, value, slots, scales=scales, codes=codes)
    if beside is not None:
        if beside.joins:
            beside.compute_with(launch)
            return launch.query
        beside.compute()
    rotate_and_write[(len(qkv), launch.programs)](
        *launch.arguments, **launch.constants, **overlap(qkv.device)
    )
    return launch.query


def prepare_heads(
    qkv: torch.Tensor,
    steps: HeadSteps,
    table: RotaryTable | None,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    *,
    scales: tuple[float, float],
    codes: str,
) -> HeadLaunch:
    """Return the launch of `write_projected`."""
    heads, dim = steps.heads, steps.head_dim
    rotary = steps.rotary if table is not None else None
    turned = 0 if rotary is None else rotary.spec.dim
    cos, sin = (table.cos, table.sin) if turned and table is not None else (qkv, qkv)
    query_scale = None if table is None else table.query_scale
    still = not turned and steps.gain is None and not steps.clip and query_scale is None
    if still:  # nothing happens to queries, and the kernel does not copy them
        query = qkv[:, : heads * dim].view(len(qkv), heads, dim)
    else:
        query = torch.empty((len(qkv), heads, dim), dtype=qkv.dtype, device=qkv.device)
    first, widest = heads if still else 0, max(dim, steps.value_dim)
    block = count_heads(widest)
    vectors = (qkv if each is None else each for each in (steps.gain, steps.bias, query_scale))
    numbers = steps.eps, steps.clip, steps.value_scale, *scales, qkv.stride(0)
    arguments = query, key, value, qkv, cos, sin, slots, *vectors, *numbers
    constants = {
        "PADDED_DIM": pad_dim(widest),
        "ROTARY": turned,
        "INTERLEAVED": rotary is not None and rotary.spec.interleaved,
        "SCALES_QUERIES": query_scale is not None,
        "CODES": codes,
        "FIRST": first,
        "BLOCK": block,
        **head_constants(steps),
    }
    programs = -(-(heads + 2 * steps.kv_heads - first) // block)
    return HeadLaunch(query, programs, arguments, constants)


def head_constants(steps: HeadSteps) -> dict[str, Any]:
    """Return the constants of `rotate_and_write` that a layer's heads determine by themselves."""
    return {
        "HEADS": steps.heads,
        "KV_HEADS": steps.kv_heads,
        "DIM": steps.head_dim,
        "VALUE": steps.value_dim or steps.head_dim,
        "CLIPS": steps.clip > 0,
        "NORM": "" if steps.gain is None else "whole" if steps.norm_whole else steps.norm,
        "NORM_LAST": steps.norm_last and steps.gain is not None,
        "HAS_BIAS": steps.bias is not None,
        "KEYS_AS_VALUES": steps.keys_as_values,
        "VALUE_NORM": steps.value_norm,
    }


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
) -> torch.Tensor:
    """Write keys to their slots, unless they are another layer's; return queries to expand.

    These are compressed ones [T, query_rank], normalised, or all as projected. `projected`: [T,
    ...] as for `LatentProjections`, with contiguous rows; `key`: [slots, 1, at least rank +
    rotary_dim], one layer of the cache, in the format `codes` with a `scale`; `slots`: int64 [T].
    """
    spec = latent.spec
    if latent.reads_only:
        return projected
    tokens, width = len(projected), projected.shape[1] - spec.rank - spec.rotary_dim
    query, makes = projected[:, :width], latent.query_up is not None
    if makes:
        query = torch.empty((tokens, width), dtype=projected.dtype, device=projected.device)
    norms, eps, constants = describe_latents(latent, rotary, projected, key, width)
    write_latents[(tokens, 2 if makes else 1)](
        *(key, query, projected, table.cos, table.sin, slots, *norms, *eps),
        scale,
        projected.stride(0),
        **constants,
        CODES=codes,
    )
    return query


def describe_latents(
    latent: LatentProjections,
    rotary: Rotary,
    projected: torch.Tensor,
    key: torch.Tensor,
    width: int,
) -> tuple[tuple[torch.Tensor, ...], tuple[float, float], dict[str, Any]]:
    """Return what `write_latents` needs to know of a layer: weights and eps of norms, constants.

    `projected` and `key` as for `write_latent_keys`; `width`: of queries in `projected`.
    """
    spec, norm = latent.spec, latent.latent_norm
    if norm is None:
        raise ValueError("the latents are another layer's, and are not written")
    inner = latent.query_norm or norm  # unused if queries are not compressed
    vectors = (norm.weight, norm.bias, inner.weight, inner.bias)
    constants = {
        **{"QUERY": width, "PADDED_QUERY": pad_dim(width)},
        **{"RANK": spec.rank, "PADDED_RANK": pad_dim(spec.rank)},
        **{"ROTARY": spec.rotary_dim, "PADDED_ROTARY": pad_dim(spec.rotary_dim)},
        **{"WIDTH": key.shape[-1], "INTERLEAVED": rotary.spec.interleaved, "KIND": norm.kind},
        **{"HAS_GAIN": norm.weight is not None, "HAS_BIAS": norm.bias is not None},
    }
    weights = tuple(projected if vector is None else vector for vector in vectors)
    return weights, (norm.eps, inner.eps), constants


def absorb_queries(
    latent: LatentProjections, query: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries over latents [T, heads, rank], and their ends, of expanded ones [T, heads *
    size]: neither is scaled or rotated yet.
    """
    spec = latent.spec
    query = query.view(len(query), len(latent.key_up), spec.plain_dim + spec.rotary_dim)
    plain, ends = query.split((spec.plain_dim, spec.rotary_dim), dim=-1)
    return latent.absorb(plain), ends


def count_heads(head_dim: int) -> int:
    """Return the heads that a program has."""
    return max(1, _ELEMENTS // pad_dim(head_dim))
