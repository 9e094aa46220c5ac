"""The tiles of the attention kernels, by dtype, head size and device."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from tgi_trio.shard.torch_backend.kv_cache import KVShape
from tgi_trio.shard.torch_backend.padding import next_power_of_2
from tgi_trio.shard.torch_backend.torch_device import Generation


class Tile(NamedTuple):
    """Sizes of a program's work; powers of two."""

    lanes: int  # (query, head) pairs; at least 16, as tensor cores multiply no fewer rows
    keys: int  # of one step of the loop
    warps: int
    stages: int = 3  # of software pipelining: tiles of keys whose loads are in flight


_BY_HEAD_SIZE = tuple[tuple[int, Tile], ...]  # (head size up to, tile)

# The fastest on an H200 among those whose registers do not spill (figures in docs/device/); of
# heads beyond 256 the largest that do not, as no device has run them. Half of the stages look up
# block numbers, so with 5 stages two tiles of keys are in flight. Heads of 64 need warps that
# seldom wait for one another; larger ones have enough bytes in flight anyway.
_DECODE: Final[_BY_HEAD_SIZE] = (
    (64, Tile(16, 64, 2, 5)),
    (128, Tile(16, 64, 4)),
    (256, Tile(16, 32, 4)),
    (512, Tile(16, 16, 8)),
)
# A single row has few programs, with few keys each. They must be able to begin beside the products
# around them: a multiprocessor's split of shared memory and cache changes only while it is idle.
_LONE_DECODE: Final[_BY_HEAD_SIZE] = ((64, Tile(16, 64, 2)), *_DECODE[1:])
_PREFILL: Final[dict[Generation, _BY_HEAD_SIZE]] = {
    "ampere": (
        (64, Tile(64, 64, 4)),
        (128, Tile(64, 64, 8)),
        (256, Tile(64, 32, 8)),
        (512, Tile(32, 32, 8, 2)),
    ),
    "hopper": ((64, Tile(128, 64, 4)), (256, Tile(128, 64, 8)), (512, Tile(32, 32, 8))),
}
# 8-bit K and V take registers twice: as bytes, and as the numbers that they stand for.
_EIGHT_BITS_DECODE: Final[_BY_HEAD_SIZE] = (
    (128, Tile(16, 64, 8)),
    (256, Tile(16, 32, 4)),
    (512, Tile(16, 16, 8)),
)
_EIGHT_BITS_PREFILL: Final[dict[Generation, _BY_HEAD_SIZE]] = {
    "ampere": (
        (64, Tile(64, 64, 4)),
        (128, Tile(64, 64, 8)),
        (256, Tile(64, 16, 8)),
        (512, Tile(32, 16, 8)),
    ),
    "hopper": (
        (64, Tile(128, 64, 4)),
        (128, Tile(128, 64, 8)),
        (256, Tile(128, 32, 8)),
        (512, Tile(32, 32, 8)),
    ),
}
# Of values so narrow that they are padded to fewer numbers than keys; larger tiles spill there.
_NARROW_PREFILL: Final = Tile(64, 32, 4)
# float32 does not use the tensor cores, and takes twice the registers.
_WIDE: Final[_BY_HEAD_SIZE] = (
    (64, Tile(16, 32, 4)),
    (256, Tile(16, 32, 8)),
    (512, Tile(16, 16, 8)),
)
# Where batch invariance is kept: of decodes and prompts alike. A span's sums take registers beside
# those of the spans before it.
_SPANS: Final[_BY_HEAD_SIZE] = (
    (128, Tile(64, 32, 8)),
    (256, Tile(32, 32, 8)),
    (512, Tile(16, 32, 8, 2)),
)
_WIDE_SPANS: Final[_BY_HEAD_SIZE] = (
    (64, Tile(16, 32, 8)),
    (128, Tile(16, 32, 4)),
    (256, Tile(16, 16, 4)),
    (512, Tile(16, 16, 8)),
)
# Latents of up to 512 numbers and a rotated end: the results take most of the registers.
_FEW_LATENT: Final = Tile(16, 32, 8, 2)
_LATENT: Final = Tile(32, 32, 8, 2)
_LATENT_SPANS: Final = Tile(16, 32, 8, 2)
_WIDE_LATENT: Final = Tile(16, 16, 8, 2)
# Of attention to entries. Keys without such an end leave room for a second tile of them in flight,
# which takes two stages more than there are lookups before a key, each of them two stages.
_ENTRIES_STAGES: Final = 5
_CHOSEN_STAGES: Final = 7
MOST_FLASH: Final = 256  # numbers of the largest head that flash-attn's kernel holds
MOST_PARTS: Final = 32  # into which a tile's keys are divided
_MOST, _MOST_ENTRIES = 512, 512  # numbers of the largest head
_MOST_INDEX: Final = 256  # of the largest index key, for blocks
_MOST_RANK: Final = 512  # of the largest latent
_MOST_LATENT: Final = _MOST_RANK + 64  # with its rotated end


def fits_kernels(shape: KVShape) -> bool:
    """Return whether the kernels hold the keys and values of all layers."""
    if shape.same:
        return shape.head_dim <= _MOST_LATENT
    return all(max(size.key_dim, size.value_dim) <= _MOST for size in shape.by_layer())


def fits_flash(shape: KVShape) -> bool:
    """Return whether flash-attn's kernel holds the heads of some layers."""
    sizes = shape.by_layer()
    return not shape.same and any(size.key_dim == size.value_dim <= MOST_FLASH for size in sizes)


def fits_latents(rank: int) -> bool:
    """Return whether the kernels hold latents of `rank` numbers, whatever lies behind them."""
    return rank <= _MOST_RANK


def choose_latent_tile(dtype: torch.dtype, heads: int, *, decodes: bool) -> Tile:
    """Return the tile of attention over latents."""
    half = _FEW_LATENT if decodes and heads <= _FEW_LATENT.lanes else _LATENT
    return _WIDE_LATENT if dtype.itemsize > 2 else half


def choose_latent_spans_tile(dtype: torch.dtype) -> Tile:
    """Return the tile over latents where batch invariance is kept."""
    return _WIDE_LATENT if dtype.itemsize > 2 else _LATENT_SPANS


def choose_entries_tile(dtype: torch.dtype, heads: int, *, chosen: bool) -> Tile:
    """Return the tile of attention to entries, all of them or `chosen` ones.

    A tile has heads of one token, so it is that of decodes.
    """
    stages = _CHOSEN_STAGES if chosen else _ENTRIES_STAGES
    return choose_latent_tile(dtype, heads, decodes=True)._replace(stages=stages)


def choose_entry_spans_tile(dtype: torch.dtype, heads: int, *, chosen: bool) -> Tile:
    """Return the tile of attention to entries where batch invariance is kept.

    In float32 a second tile of chosen keys in flight would spill.
    """
    tile = choose_entries_tile(dtype, heads, chosen=chosen and dtype.itemsize == 2)
    return tile._replace(lanes=choose_latent_spans_tile(dtype).lanes)


def fits_index(dim: int) -> bool:
    """Return whether the kernels hold the keys of an index that chooses blocks."""
    return dim <= _MOST_INDEX


def fits_entries(shape: KVShape) -> bool:
    """Return whether the kernels hold heads of a shape that attend to entries."""
    return all(size.value_dim <= _MOST_ENTRIES for size in shape.by_layer())


def choose_tile(
    dtype: torch.dtype,
    key_dim: int,
    value_dim: int,
    generation: Generation,
    *,
    decodes: int,
    eight_bits: bool = False,
) -> Tile:
    """Return the tile for heads with keys and values of up to 512 numbers.

    `decodes`: the number of rows if each has one query, else 0; `eight_bits`: of K and V.
    """
    head_dim = max(key_dim, value_dim)
    narrow = pad_dim(value_dim) < pad_dim(key_dim) == 256
    if narrow and not decodes and dtype.itemsize == 2 and generation == "hopper":
        return _NARROW_PREFILL
    half = _PREFILL[generation]
    if decodes:
        half = _LONE_DECODE if decodes == 1 else _DECODE
    if eight_bits:
        half = _EIGHT_BITS_DECODE if decodes else _EIGHT_BITS_PREFILL[generation]
    table = _WIDE if dtype.itemsize > 2 else half
    return next(tile for most, tile in table if head_dim <= most)


def choose_spans_tile(dtype: torch.dtype, key_dim: int, value_dim: int) -> Tile:
    """Return the tile where batch invariance is kept, whatever a step has of rows."""
    table = _WIDE_SPANS if dtype.itemsize > 2 else _SPANS
    return next(tile for most, tile in table if max(key_dim, value_dim) <= most)


def pad_dim(head_dim: int) -> int:
    """Return the power of two that holds a head; at least 16, for tensor cores."""
    return max(16, next_power_of_2(head_dim))
