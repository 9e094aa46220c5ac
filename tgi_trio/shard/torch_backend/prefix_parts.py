"""Parts of computed prefixes in tensors, on a CPU or a device; see `kept_prefixes.py`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from tgi_trio.shard.prefixes.kept_prefixes import Bytes, Ints, Part, PrefixParts
from tgi_trio.shard.torch_backend.host_copies import TorchHostCopies
from tgi_trio.shard.torch_backend.kv_cache import KVCache
from tgi_trio.shard.torch_backend.states.pool import StatePool


class TensorPart:
    """A tensor of blocks, or of slots of states."""

    def __init__(self, tensor: torch.Tensor, items: int) -> None:
        """`tensor`: contiguous, of so many blocks or slots."""
        self._bytes = tensor.view(items, -1).view(torch.uint8)

    @property
    def item_bytes(self) -> int:
        return self._bytes.shape[1]

    @torch.inference_mode()
    def take(self, items: Ints) -> Bytes:
        places = torch.from_numpy(items).to(self._bytes.device)
        taken: Bytes = self._bytes.index_select(0, places).cpu().numpy()
        return taken

    @torch.inference_mode()
    def put(self, first: int, data: Bytes) -> None:
        self._bytes[first : first + len(data)].copy_(torch.from_numpy(data))


class CopiedPart:
    """The copies of a part in the host's memory: a range of bytes of each row."""

    def __init__(self, pieces: Sequence[torch.Tensor], begin: int, item_bytes: int) -> None:
        """`pieces`: rows of whole items, on the host; places, from 1 on, number the rows of all."""
        self._pieces = [piece.view(torch.uint8).numpy() for piece in pieces]
        self._ends = np.cumsum([len(piece) for piece in pieces])
        self._range = slice(begin, begin + item_bytes)
        self.item_bytes = item_bytes

    def take(self, items: Ints) -> Bytes:
        data = np.empty((len(items), self.item_bytes), np.uint8)
        for place, row in zip(items.tolist(), data, strict=True):
            row[:] = self._row(place)
        return data

    def put(self, first: int, data: Bytes) -> None:
        for place, row in enumerate(data, first):
            self._row(place)[:] = row

    def _row(self, place: int) -> Bytes:
        number = int(np.searchsorted(self._ends, place))
        piece = self._pieces[number]
        row: Bytes = piece[place - 1 - (int(self._ends[number]) - len(piece)), self._range]
        return row


def find_parts(
    cache: KVCache | None,
    beside: Sequence[torch.Tensor] = (),
    pool: StatePool | None = None,
    copies: TorchHostCopies | None = None,
) -> PrefixParts:
    """Return what a rank knows of prefixes.

    `beside`: what a drafter keeps of tokens, each [blocks * BLOCK_SIZE, ...]; `copies`: of all that
    in the host's memory.
    """
    if cache is None:
        return PrefixParts()
    blocks = [TensorPart(each, cache.blocks) for each in (*cache.tensors, *beside)]
    states = [] if pool is None else pool.tensors
    slots = [TensorPart(each, len(each)) for each in states]
    if copies is None:
        return PrefixParts(blocks, slots)
    of_blocks, of_slots = copies.rows
    return PrefixParts(blocks, slots, copy_parts(blocks, of_blocks), copy_parts(slots, of_slots))


def copy_parts(parts: Sequence[Part], pieces: Sequence[torch.Tensor]) -> list[CopiedPart]:
    """Return the copies of parts, which the rows of pieces have one after the other.

    `pieces`: [rows, words], on the host.
    """
    widths = [part.item_bytes for part in parts]
    begins = accumulate(widths[:-1], initial=0)
    return [CopiedPart(pieces, *at) for at in zip(begins, widths, strict=False)]
