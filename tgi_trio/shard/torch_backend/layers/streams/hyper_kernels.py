"""Launches the kernels of hyper-connections: one before each part of a layer, and one behind it.

Imported only where Triton is installed.
"""

from __future__ import annotations

from typing import Final

import torch

from tgi_trio.model.specs.decoder import HyperSpec
from tgi_trio.shard.torch_backend.batch_invariance import apparent_rows
from tgi_trio.shard.torch_backend.kernels.streams import hyper_connections as kernels
from tgi_trio.shard.torch_backend.layers.expert_parts import ExpertParts
from tgi_trio.shard.torch_backend.layers.norm import Norm
from tgi_trio.shard.torch_backend.layers.residual import count_warps
from tgi_trio.shard.torch_backend.layers.streams.hyper_weights import HyperWeights
from tgi_trio.shard.torch_backend.padding import next_power_of_2
from tgi_trio.shard.torch_backend.torch_device import FLOAT32_PRODUCTS, overlap

_PROGRAMS: Final = 512  # that multiply at once, if there is work for so many
MOST_SHARES: Final = 64  # of a token's numbers
_FEW: Final = 16  # tokens of a program, as tensor cores multiply no fewer
_MANY: Final = 64

Read = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def mix(weights: HyperWeights, streams: torch.Tensor) -> torch.Tensor:
    """Return what weights of `streams` [T, count, hidden] are made of.

    That is float32 [T, shares, weights + 1]: the sums over shares of the products of `HyperWeights`
    with states that are not normalised yet, and of their squares.
    """
    wanted, size = weights.mix.shape
    tokens, depth, shares = _divide(apparent_rows(len(streams), invariant=weights.invariant), size)
    parts = weights.mix.new_empty((len(streams), shares, wanted + 1))
    kernels.mix_streams[(-(-len(streams) // tokens), shares)](
        *(parts, streams, weights.mix, len(streams)),
        SIZE=size,
        WEIGHTS=wanted,
        PADDED=max(16, next_power_of_2(wanted)),
        TOKENS=tokens,
        DEPTH=depth,
        PRECISION=FLOAT32_PRODUCTS,
        **overlap(streams.device),
    )
    return parts


def read(
    spec: HyperSpec,
    weights: HyperWeights,
    streams: torch.Tensor,
    parts: torch.Tensor,
    norm: Norm | None = None,
    *,
    adds: bool = True,
) -> Read:
    """Compute `HyperConnection.enter`, or, if not `adds`, only the weighted sum.

    `streams`: [T, count, hidden], contiguous; `parts`: of `mix` or `write`.
    """
    tokens, count, hidden = streams.shape
    normed = streams.new_empty((tokens, hidden))
    added = parts.new_empty((tokens, count)) if adds else parts
    mixes = adds and spec.iterations > 0
    mixture = parts.new_empty((tokens, count, count)) if mixes else None
    kernels.read_streams[(tokens,)](
        *(normed, added, added if mixture is None else mixture),
        *(parts, streams, weights.base, weights.scale),
        streams if norm is None or norm.weight is None else norm.weight,
        streams if norm is None or norm.bias is None else norm.bias,
        *(weights.eps, spec.eps, spec.added, spec.added_eps, 0.0 if norm is None else norm.eps),
        parts.shape[1],
        COUNT=count,
        PADDED=next_power_of_2(count),
        MOST_SHARES=MOST_SHARES,
        ADDS=adds,
        ITERATIONS=spec.iterations if mixes else 0,
        HIDDEN=hidden,
        PADDED_HIDDEN=next_power_of_2(hidden),
        KIND="" if norm is None else norm.kind,
        HAS_GAIN=norm is not None and norm.weight is not None,
        HAS_BIAS=norm is not None and norm.bias is not None,
        **overlap(streams.device),
        num_warps=count_warps(next_power_of_2(hidden)),
    )
    return normed, added, mixture


def write(
    streams: torch.Tensor,
    found: torch.Tensor | ExpertParts,
    added: torch.Tensor,
    mixture: torch.Tensor | None,
    following: HyperWeights | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute `HyperConnection.leave`; return `mix` of the result as well.

    `following`: the weights of the next part; None: there are none, nor is there a `mix`.
    """
    (count, hidden), written = streams.shape[1:], torch.empty_like(streams)
    invariant = following is not None and following.invariant
    apparent = apparent_rows(len(streams), invariant=invariant)
    tokens, depth, shares = _divide(apparent, count * hidden)
    read, kind = ExpertParts.describe(found)
    wanted, parts = 0, None
    if following is not None:
        wanted = len(following.mix)
        parts = added.new_empty((len(streams), shares, wanted + 1))
    kernels.write_streams[(-(-len(streams) // tokens), shares)](
        *(written, added if parts is None else parts, streams, *read, added),
        added if mixture is None else mixture,
        added if following is None else following.mix,
        len(streams),
        COUNT=count,
        HIDDEN=hidden,
        MIXES=mixture is not None,
        WEIGHTS=wanted,
        PADDED=max(16, next_power_of_2(wanted)),
        TOKENS=tokens,
        DEPTH=depth,
        PRECISION=FLOAT32_PRODUCTS,
        **kind,
        **overlap(streams.device),
    )
    return written, parts


def choose_tile(tokens: int) -> tuple[int, int]:
    """Return how many tokens a program multiplies, and how many numbers of each at a time."""
    return (_FEW, 64) if tokens <= _FEW * _FEW else (_MANY, 32)


def _divide(tokens: int, size: int) -> tuple[int, int, int]:
    """Return `choose_tile`, and how many programs share the `size` numbers of a tile of tokens."""
    each, depth = choose_tile(tokens)
    return each, depth, count_shares(-(-tokens // each), size // depth)


def count_shares(tiles: int, steps: int) -> int:
    """Return how many programs share so many steps of each tile: a power of two."""
    most = min(MOST_SHARES, max(1, steps), max(1, _PROGRAMS // tiles))
    return 1 << (most.bit_length() - 1)
