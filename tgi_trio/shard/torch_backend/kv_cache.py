"""The tensors that hold K and V, in blocks that block tables point into."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from tgi_trio.shard.contract import BLOCK_SIZE as BLOCK_SIZE

NULL_BLOCK = 0  # never handed out: unused entries of block tables point here


class KVShape(NamedTuple):
    """What the KV cache of a model holds per token, as this rank has it."""

    layers: int
    kv_heads: int
    head_dim: int
    same: bool = False  # a value is its key (attention over latents), and kept once

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes of K and V of one token over all layers."""
        kept = 1 if self.same else 2
        return kept * self.layers * self.kv_heads * self.head_dim * dtype.itemsize


# By the words of `--kv-cache-dtype`.
EIGHT_BITS: Final = {"fp8_e4m3fn": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


class KVCache:
    """K and V of all layers: two tensors [layers, blocks, BLOCK_SIZE, kv_heads, head_dim].

    Of 8 bits they are bytes, of which `write` and `decode` know the meaning; else plain numbers,
    which anybody may write and read. The layout flash-attention wants of a paged cache. Freshly
    zeroed memory, never garbage: what a mask hides is still multiplied by zero, and zero times NaN
    is NaN. On Linux zeroed pages take no memory until they are written.
    """

    def __init__(
        self, shape: KVShape, blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate; raises torch's out-of-memory errors. `dtype`: one of `EIGHT_BITS`, or plain."""
        self._numbers = dtype if dtype.itemsize == 1 else None
        # The word of `EIGHT_BITS` that says what bytes are; "": numbers are kept.
        self.codes = next((word for word, own in EIGHT_BITS.items() if own is dtype), "")
        dtype = torch.uint8 if self._numbers else dtype  # few operations know the others
        layers, kv_heads, head_dim, same = shape
        size = (layers, blocks, BLOCK_SIZE, kv_heads, head_dim)
        self.blocks = blocks
        self.key = torch.zeros(size, dtype=dtype, device=device)
        self.value = self.key if same else torch.zeros(size, dtype=dtype, device=device)
        # Per layer, by slot and by block: views made once, since a view costs a microsecond.
        flat = (blocks * BLOCK_SIZE, kv_heads, head_dim)
        self.key_slots = [self.key[i].view(flat) for i in range(layers)]
        self.value_slots = [self.value[i].view(flat) for i in range(layers)]
        self.key_blocks = list(self.key.unbind(0))
        self.value_blocks = list(self.value.unbind(0))

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
