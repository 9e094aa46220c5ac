"""Launches the kernels of hyper-connections: two before each part of a layer, and one behind it.

Imported only where Triton is installed.
"""

from __future__ import annotations

from typing import Final

import torch

from tgi_trio.model.spec import HyperSpec
from tgi_trio.shard.torch_backend.kernels import streams as kernels
from tgi_trio.shard.torch_backend.layers.hyper_weights import HyperWeights
from tgi_trio.shard.torch_backend.layers.norm import Norm
from tgi_trio.shard.torch_backend.layers.residual import count_warps

_PROGRAMS: Final = 512  # that multiply at once, if there is work for so many
_MOST_SHARES: Final = 64  # of a token's numbers
_FEW: Final = 16  # tokens of a program, as tensor cores multiply no fewer
_MANY: Final = 64
BLOCK: Final = 1024  # numbers that a program writes to each state


def enter(
    spec: HyperSpec, weights: HyperWeights, streams: torch.Tensor, norm: Norm | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Compute `HyperConnection.enter`."""
    streams = streams.contiguous()
    tokens, count, hidden = streams.shape
    wanted = len(weights.mix)
    few, depth = tile_of(tokens)
    tiles = -(-tokens // few)
    shares = count_shares(tiles, count * hidden // depth)
    parts = weights.mix.new_empty((tokens, shares, wanted + 1))
    kernels.mix_streams[(tiles, shares)](
        *(parts, streams, weights.mix, tokens),
        SIZE=count * hidden,
        WEIGHTS=wanted,
        PADDED=max(16, _pad(wanted)),
        TOKENS=few,
        DEPTH=depth,
    )
    normed = streams.new_empty((tokens, hidden))
    added = parts.new_empty((tokens, count))
    mixture = parts.new_empty((tokens, count, count)) if spec.iterations else None
    kernels.read_streams[(tokens,)](
        *(normed, added, added if mixture is None else mixture),
        *(parts, streams, weights.base, weights.scale),
        streams if norm is None or norm.weight is None else norm.weight,
        streams if norm is None or norm.bias is None else norm.bias,
        *(weights.eps, spec.eps, spec.added, spec.added_eps, 0.0 if norm is None else norm.eps),
        COUNT=count,
        PADDED=_pad(count),
        SHARES=shares,
        ITERATIONS=spec.iterations,
        HIDDEN=hidden,
        PADDED_HIDDEN=_pad(hidden),
        KIND="" if norm is None else norm.kind,
        HAS_GAIN=norm is not None and norm.weight is not None,
        HAS_BIAS=norm is not None and norm.bias is not None,
        num_warps=count_warps(_pad(hidden)),
    )
    return normed, added, mixture


def leave(
    streams: torch.Tensor, found: torch.Tensor, added: torch.Tensor, mixture: torch.Tensor | None
) -> torch.Tensor:
    """Compute `HyperConnection.leave`."""
    streams, written = streams.contiguous(), torch.empty_like(streams)
    tokens, count, hidden = streams.shape
    kernels.write_streams[(tokens, -(-hidden // BLOCK))](
        *(written, streams, found.contiguous(), added, added if mixture is None else mixture),
        COUNT=count,
        HIDDEN=hidden,
        BLOCK=BLOCK,
        MIXES=mixture is not None,
    )
    return written


def tile_of(tokens: int) -> tuple[int, int]:
    """Return how many tokens a program multiplies, and how many numbers of each at a time."""
    return (_FEW, 64) if tokens <= _FEW * _FEW else (_MANY, 32)


def count_shares(tiles: int, steps: int) -> int:
    """Return how many programs share the numbers of a tile of tokens: a power of two."""
    most = min(_MOST_SHARES, max(1, steps), max(1, _PROGRAMS // tiles))
    return 1 << (most.bit_length() - 1)


def _pad(count: int) -> int:
    """Return the next power of two."""
    return 1 << (count - 1).bit_length()
