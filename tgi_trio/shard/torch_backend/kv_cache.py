"""The tensors that hold K and V, in blocks that block tables point into."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from tgi_trio.shard.contract import BLOCK_SIZE as BLOCK_SIZE

NULL_BLOCK = 0  # never handed out: unused entries of block tables point here


class KVSize(NamedTuple):
    """What one layer holds per token."""

    kv_heads: int
    key_dim: int
    value_dim: int


class KVShape(NamedTuple):
    """What the KV cache of a model holds per token, as this rank has it."""

    layers: int
    kv_heads: int  # the most, where layers differ
    head_dim: int  # the largest
    same: bool = False  # a value is its key (attention over latents), and kept once
    sizes: tuple[KVSize, ...] = ()  # of every layer, where they differ, or values are narrower

    @classmethod
    def of(cls, sizes: Sequence[KVSize], *, same: bool = False) -> KVShape:
        """Return what layers of these sizes hold."""
        if not sizes:
            return cls(0, 0, 0)
        kv_heads, key_dim = (max(size[i] for size in sizes) for i in (0, 1))
        alike = all(size == (kv_heads, key_dim, key_dim) for size in sizes)
        return cls(len(sizes), kv_heads, key_dim, same, () if alike else tuple(sizes))

    def by_layer(self) -> tuple[KVSize, ...]:
        """Return what every layer holds."""
        alike = KVSize(self.kv_heads, self.head_dim, self.head_dim)
        return self.sizes or (alike,) * self.layers

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes of K and V of one token over all layers."""
        numbers = (
            heads * (key_dim + (0 if self.same else value_dim))
            for heads, key_dim, value_dim in self.by_layer()
        )
        return sum(numbers) * dtype.itemsize


# By the words of `--kv-cache-dtype`.
EIGHT_BITS: Final = {"fp8_e4m3fn": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


class KVCache:
    """K and V of all layers, each in one tensor, of which every layer has a part of its size.

    `key_blocks` and `value_blocks` are the parts [blocks, BLOCK_SIZE, kv_heads, head_dim],
    `key_slots` and `value_slots` the same as [blocks * BLOCK_SIZE, kv_heads, head_dim]. A block is
    of all layers at once, whatever they hold in it. Of 8 bits they are bytes, of which `write` and
    `decode` know the meaning; else plain numbers, which anybody may write and read. The layout
    flash-attention wants of a paged cache. Freshly zeroed memory, never garbage: what a mask hides
    is still multiplied by zero, and zero times NaN is NaN. On Linux zeroed pages take no memory
    until they are written.
    """

    def __init__(
        self, shape: KVShape, blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate; raises torch's out-of-memory errors. `dtype`: one of `EIGHT_BITS`, or plain."""
        self._numbers = dtype if dtype.itemsize == 1 else None
        # The word of `EIGHT_BITS` that says what bytes are; "": numbers are kept.
        self.codes = next((word for word, own in EIGHT_BITS.items() if own is dtype), "")
        dtype = torch.uint8 if self._numbers else dtype  # few operations know the others
        self.blocks = blocks
        sizes, slots = shape.by_layer(), blocks * BLOCK_SIZE
        keys = [(slots, heads, dim) for heads, dim, _ in sizes]
        values = [(slots, heads, dim) for heads, _, dim in sizes]
        # Views are made once, since one costs a microsecond.
        self.key, self.key_slots = _zeros(keys, dtype, device)
        self.value, self.value_slots = self.key, self.key_slots
        if not shape.same:
            self.value, self.value_slots = _zeros(values, dtype, device)
        by_block = (blocks, BLOCK_SIZE)
        self.key_blocks = [part.unflatten(0, by_block) for part in self.key_slots]
        self.value_blocks = [part.unflatten(0, by_block) for part in self.value_slots]

    def write(
        self,
        layer: int,
        slots: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write K and V [T, kv_heads, head_dim] to `slots`; return what is read of them there.

        `scales`: what 1 stands for among the 8-bit numbers of K and of V.
        """
        stored = tuple(
            self._encode(each, scale) for each, scale in zip((key, value), scales, strict=True)
        )
        self.key_slots[layer].index_copy_(0, slots, stored[0])
        self.value_slots[layer].index_copy_(0, slots, stored[1])
        return (
            self.decode(stored[0], scales[0], key.dtype),
            self.decode(stored[1], scales[1], value.dtype),
        )

    def decode(self, stored: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
        """Return what was read of K or V as numbers of `dtype`; themselves where they are."""
        if self._numbers is None:
            return stored
        numbers = stored.view(self._numbers).float()
        return (numbers if scale == 1.0 else numbers * scale).to(dtype)

    def _encode(self, numbers: torch.Tensor, scale: float) -> torch.Tensor:
        """Return the nearest of what can be stored; what is too large becomes the largest."""
        if self._numbers is None:
            return numbers
        most = torch.finfo(self._numbers).max
        exact = numbers.float() if scale == 1.0 else numbers.float() / scale
        return exact.clamp(-most, most).to(self._numbers).view(torch.uint8)

    @property
    def nbytes(self) -> int:
        return self.key.nbytes + (0 if self.value is self.key else self.value.nbytes)


def _zeros(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return zeros [numbers of all shapes], and views of these shapes, one behind the other."""
    sizes = [math.prod(shape) for shape in shapes]
    whole = torch.zeros(sum(sizes), dtype=dtype, device=device)
    parts = zip(whole.split(sizes), shapes, strict=True)
    return whole, [part.view(shape) for part, shape in parts]
