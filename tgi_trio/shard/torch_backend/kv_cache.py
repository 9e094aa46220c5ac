"""The paged KV cache: tensors of K and V in blocks, to which block tables point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Final, NamedTuple

import torch

from tgi_trio.ipc.startup import BLOCK_SIZE

_TURNS: Final = 3  # time, row and column
_TURN: Final = torch.int32

NULL_BLOCK = 0  # never handed out: unused entries of block tables point here


class KVSize(NamedTuple):
    """What one layer holds per token."""

    kv_heads: int
    key_dim: int
    value_dim: int


class KVShape(NamedTuple):
    """What the KV cache of a model holds per token on this rank."""

    layers: int
    kv_heads: int  # the most, where layers differ
    head_dim: int  # the largest
    same: bool = False  # values are the keys (attention over latents), so they are kept once
    sizes: tuple[KVSize, ...] = ()  # of every layer; empty if all are alike, K as wide as V
    turns: bool = False  # what a token turns by is kept as well: `KVCache.turns`

    @classmethod
    def of(cls, sizes: Sequence[KVSize], *, same: bool = False, turns: bool = False) -> KVShape:
        """Return the shape for layers of these sizes."""
        if not sizes:
            return cls(0, 0, 0)
        kv_heads, key_dim = (max(size[i] for size in sizes) for i in (0, 1))
        alike = all(size == (kv_heads, key_dim, key_dim) for size in sizes)
        return cls(len(sizes), kv_heads, key_dim, same, () if alike else tuple(sizes), turns)

    def by_layer(self) -> tuple[KVSize, ...]:
        """Return the size of every layer."""
        alike = KVSize(self.kv_heads, self.head_dim, self.head_dim)
        return self.sizes or (alike,) * self.layers

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes that one token takes over all layers."""
        numbers = (
            heads * (key_dim + (0 if self.same else value_dim))
            for heads, key_dim, value_dim in self.by_layer()
        )
        return sum(numbers) * dtype.itemsize + (_TURNS * _TURN.itemsize if self.turns else 0)


# By the values of `--kv-cache-dtype`.
EIGHT_BITS: Final = {"fp8_e4m3fn": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


class KVCache:
    """K and V of all layers, each in one tensor that is divided between the layers.

    `key_blocks` and `value_blocks` are the layers' parts [blocks, BLOCK_SIZE, kv_heads, head_dim],
    in flash-attention's layout of a paged cache; `key_slots` and `value_slots` are the same as
    [blocks * BLOCK_SIZE, kv_heads, head_dim]. A block's number is the same in all layers. With an
    8-bit dtype these tensors are uint8, which `write` and `decode` convert; otherwise they are
    plain numbers, which anybody may read and write. Memory is zeroed: what a mask hides is still
    multiplied by zero, and zero times NaN is NaN. On Linux, zeroed pages take no memory until they
    are written.

    `turns` [blocks * BLOCK_SIZE, 3] are the rotary positions of the tokens, for attention that
    makes keys later, of several tokens; None where no layer does, or positions have but one part.
    """

    def __init__(
        self, shape: KVShape, blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate; raises torch's out-of-memory errors. `dtype`: one of `EIGHT_BITS`, or wider."""
        self._numbers = dtype if dtype.itemsize == 1 else None
        # The key in `EIGHT_BITS` of the dtype; "" for wider numbers.
        self.codes = next((word for word, own in EIGHT_BITS.items() if own is dtype), "")
        dtype = torch.uint8 if self._numbers else dtype  # few operations support 8-bit floats
        self.blocks = blocks
        sizes, slots = shape.by_layer(), blocks * BLOCK_SIZE
        keys = [(slots, heads, dim) for heads, dim, _ in sizes]
        values = [(slots, heads, dim) for heads, _, dim in sizes]
        # Views are made once, since making one takes a microsecond.
        self.key, self.key_slots = _zeros(keys, dtype, device)
        self.value, self.value_slots = self.key, self.key_slots
        if not shape.same:
            self.value, self.value_slots = _zeros(values, dtype, device)
        self.turns = torch.zeros(slots, _TURNS, dtype=_TURN, device=device) if shape.turns else None
        by_block = (blocks, BLOCK_SIZE)
        self.key_blocks = [part.unflatten(0, by_block) for part in self.key_slots]
        self.value_blocks = [part.unflatten(0, by_block) for part in self.value_slots]

    def value_dim(self, layer: int) -> int:
        """Return the numbers of a layer's values, or of its keys where those serve as values."""
        return self.value_slots[layer].shape[-1]

    def write(
        self,
        layer: int,
        slots: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write K and V [T, kv_heads, head_dim] to `slots`; return them as they will be read.

        `scales`: the values of an 8-bit 1 in K and in V.
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

    def write_part(
        self, layer: int, slots: torch.Tensor, part: slice, numbers: torch.Tensor, scale: float
    ) -> None:
        """Write `numbers` [T, 1, ...] to a part of a layer's keys; `scale`: of an 8-bit 1."""
        self.key_slots[layer][..., part].index_copy_(0, slots, self._encode(numbers, scale))

    def keep_turns(self, slots: torch.Tensor, positions: torch.Tensor) -> None:
        """Keep the rotary positions of tokens, int64 [T] or [3, T], where they are kept.

        To be called before attention, with the `slots` [T] of the tokens.
        """
        if self.turns is not None:
            turns = positions.expand(_TURNS, -1).T.to(_TURN)
            self.turns.index_copy_(0, slots, turns)

    def decode(self, stored: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
        """Return numbers read from K or V in `dtype`; unchanged if the cache is not of 8 bits."""
        if self._numbers is None:
            return stored
        numbers = stored.view(self._numbers).float()
        return (numbers if scale == 1.0 else numbers * scale).to(dtype)

    def _encode(self, numbers: torch.Tensor, scale: float) -> torch.Tensor:
        """Return the nearest numbers that can be stored, clamped to the dtype's range."""
        if self._numbers is None:
            return numbers
        most = torch.finfo(self._numbers).max
        exact = numbers.float() if scale == 1.0 else numbers.float() / scale
        return exact.clamp(-most, most).to(self._numbers).view(torch.uint8)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Everything that is kept, each [blocks * BLOCK_SIZE, ...]: layer by layer, then turns."""
        own = [*self.key_slots, *([] if self.value is self.key else self.value_slots)]
        return own if self.turns is None else [*own, self.turns]

    @property
    def planes(self) -> list[torch.Tensor]:
        """The same, [layers, blocks, ...]: those of neighbouring layers of one size are one."""
        own = [self.turns.view(1, self.blocks, -1)] if self.turns is not None else []
        if self.value is not self.key:
            own = [*_planes(self.value, self.value_slots, self.blocks), *own]
        return [*_planes(self.key, self.key_slots, self.blocks), *own]

    @property
    def nbytes(self) -> int:
        own = [self.key] if self.value is self.key else [self.key, self.value]
        return sum(part.nbytes for part in (*own, self.turns) if part is not None)


def _planes(whole: torch.Tensor, slots: Sequence[torch.Tensor], blocks: int) -> list[torch.Tensor]:
    """Return the layers' parts of a flat tensor, neighbours of one size together."""
    found, at = [], 0
    for _, run in groupby(slots, key=lambda part: part.numel()):
        layers = list(run)
        size = layers[0].numel()
        if size:
            part = whole[at : at + size * len(layers)]
            found.append(part.view(len(layers), blocks, size // blocks))
        at += size * len(layers)
    return found


def _zeros(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return one flat tensor of zeros, and consecutive views of it with these shapes."""
    sizes = [math.prod(shape) for shape in shapes]
    whole = torch.zeros(sum(sizes), dtype=dtype, device=device)
    parts = zip(whole.split(sizes), shapes, strict=True)
    return whole, [part.view(shape) for part, shape in parts]
