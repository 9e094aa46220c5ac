"""What a program of the attention kernels computes together, by dtype, head size and device."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from tgi_trio.shard.torch_backend.kv_cache import KVShape
from tgi_trio.shard.torch_backend.torch_device import Generation


class Tile(NamedTuple):
    """Powers of two."""

    lanes: int  # (query, head) pairs; 16 are the smallest matrix that tensor cores multiply
    keys: int  # looked at together
    warps: int
    stages: int = 3  # tiles of keys that are under way at a time


_BY_HEAD_SIZE = tuple[tuple[int, Tile], ...]  # (head size up to, tile)

# What an H200 was fastest with, of what does not spill (docs/device.md has the figures). Half of
# the stages find blocks' numbers, so of 5 two tiles of keys are under way at a time. Heads of 64
# want warps that seldom wait for one another; larger ones have enough bytes under way anyhow.
_DECODE: Final[_BY_HEAD_SIZE] = (
    (64, Tile(16, 64, 2, 5)),
    (128, Tile(16, 64, 4)),
    (256, Tile(16, 32, 4)),
)
# A lone row's programs are few, with few keys each. What counts is that they begin beside the
# products around them: a multiprocessor whose memory is to be divided anew must first be idle.
_LONE_DECODE: Final[_BY_HEAD_SIZE] = ((64, Tile(16, 64, 2)), *_DECODE[1:])
_PREFILL: Final[dict[Generation, _BY_HEAD_SIZE]] = {
    "ampere": ((64, Tile(64, 64, 4)), (128, Tile(64, 64, 8)), (256, Tile(64, 32, 8))),
    "hopper": ((64, Tile(128, 64, 4)), (256, Tile(128, 64, 8))),
}
# K and V of 8 bits take registers twice: as bytes, and as the numbers that they become.
_EIGHT_BITS_DECODE: Final[_BY_HEAD_SIZE] = ((128, Tile(16, 64, 8)), (256, Tile(16, 32, 4)))
_EIGHT_BITS_PREFILL: Final[dict[Generation, _BY_HEAD_SIZE]] = {
    "ampere": ((64, Tile(64, 64, 4)), (128, Tile(64, 64, 8)), (256, Tile(64, 16, 8))),
    "hopper": ((64, Tile(128, 64, 4)), (128, Tile(128, 64, 8)), (256, Tile(128, 32, 8))),
}
# Numbers of four bytes are not for the tensor cores, and take twice the registers.
_WIDE: Final[_BY_HEAD_SIZE] = ((64, Tile(16, 32, 4)), (256, Tile(16, 32, 8)))
# Latents of up to 512 numbers and an end to rotate: results take most of the registers.
_FEW_LATENT: Final = Tile(16, 32, 8, 2)
_LATENT: Final = Tile(32, 32, 8, 2)
_WIDE_LATENT: Final = Tile(16, 16, 8, 2)
MOST_PARTS: Final = 32  # that a tile's keys are divided into
_MOST, _MOST_LATENT = 256, 512 + 64  # numbers of a head


def fits_kernels(shape: KVShape) -> bool:
    """Return whether a tile holds keys and values of a shape, which are of one width."""
    if any(size.key_dim != size.value_dim for size in shape.sizes):
        return False
    return shape.head_dim <= (_MOST_LATENT if shape.same else _MOST)


def choose_latent_tile(dtype: torch.dtype, heads: int, *, decodes: bool) -> Tile:
    """Return the tile for latents."""
    half = _FEW_LATENT if decodes and heads <= _FEW_LATENT.lanes else _LATENT
    return _WIDE_LATENT if dtype.itemsize > 2 else half


def choose_tile(
    dtype: torch.dtype,
    head_dim: int,
    generation: Generation,
    *,
    decodes: int,
    eight_bits: bool = False,
) -> Tile:
    """Return the tile for heads of up to 256 numbers.

    `decodes`: how many rows there are if each has one query, 0 if not; `eight_bits`: K and V have
    so many.
    """
    half = _PREFILL[generation]
    if decodes:
        half = _LONE_DECODE if decodes == 1 else _DECODE
    if eight_bits:
        half = _EIGHT_BITS_DECODE if decodes else _EIGHT_BITS_PREFILL[generation]
    table = _WIDE if dtype.itemsize > 2 else half
    return next(tile for most, tile in table if head_dim <= most)


def pad_dim(head_dim: int) -> int:
    """Return the power of two that holds a head, and that tensor cores take."""
    return max(16, 1 << (head_dim - 1).bit_length())
