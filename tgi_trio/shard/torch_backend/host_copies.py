"""Copies of cached blocks, and of snapshots of states, in pinned memory of the host.

A block has a part in every layer; its copy is one row of bytes. A batch of blocks is gathered into
rows on the device, by one kernel for all layers of a size, and copied in runs of neighbouring rows,
without waiting; the way back is the reverse. All that goes over a stream of its own, after the
steps launched so far and beside later ones. Copies end in the order in which they are launched.

Memory is pinned in pieces of powers of two, since torch rounds what it pins up to one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np
import torch

from tgi_trio.errors import ConfigurationError
from tgi_trio.ipc.transfers import Transfer
from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.machine import memory
from tgi_trio.shard.machine.accelerator import is_accelerator, record_event, runs_kernels
from tgi_trio.shard.prefixes.host_copies import Batch, split_transfers
from tgi_trio.shard.torch_backend.kv_cache import KVCache
from tgi_trio.shard.torch_backend.staging import Staging
from tgi_trio.shard.torch_backend.states.pool import StatePool
from tgi_trio.shard.torch_backend.states.steps import send_plain
from tgi_trio.shard.torch_backend.torch_device import without_gradients

_PIECE: Final = 1 << 28  # bytes, at most
_STAGED: Final = 32 << 20  # bytes of rows on the device, at least one
_ROWS: Final = 256  # staged at most
_STATE_SHARE: Final = 0.5  # of the memory, where a model keeps states
_ANY: Final = 1 << 16  # places of what takes no bytes


def staging_bytes(row_bytes: int) -> int:
    """Return the bytes of the device's memory that copies of such rows take."""
    return 2 * _staged_rows(row_bytes) * row_bytes  # the rows, and what is gathered at a time


def _staged_rows(row_bytes: int) -> int:
    return max(1, min(_ROWS, _STAGED // max(1, row_bytes)))


def share_room(nbytes: int, block_bytes: int, slot_bytes: int) -> tuple[list[int], list[int]]:
    """Return the rows of pieces of memory, for blocks and for slots of states.

    `nbytes`: of all pieces, at most; `slot_bytes`: 0 without states.
    """
    of_states = cut_pieces(int(nbytes * _STATE_SHARE), slot_bytes) if slot_bytes else []
    left = nbytes - sum(_pinned_bytes(rows * slot_bytes) for rows in of_states)
    return cut_pieces(left, block_bytes), of_states


def cut_pieces(nbytes: int, row_bytes: int) -> list[int]:
    """Return how many rows each of the pieces has into which memory is cut, largest first."""
    if not row_bytes:
        return [_ANY]
    found = []
    while nbytes >= row_bytes:
        piece = 1 << (nbytes.bit_length() - 1)
        if row_bytes <= _PIECE:
            piece = min(_PIECE, piece)
        if piece < row_bytes:
            break
        found.append(piece // row_bytes)
        nbytes -= piece
    return found


def _pinned_bytes(nbytes: int) -> int:
    """Return what torch takes of the host's memory for a tensor that is pinned."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def _cut_to(rows: Sequence[int], places: int) -> list[int]:
    """Return the first of these pieces, with so many rows in all."""
    found = []
    for count in rows:
        if min(count, places):
            found.append(min(count, places))
        places -= min(count, places)
    return found


class Planes(NamedTuple):
    """Where the device has blocks and slots: tensors [layers, blocks, ...] and [1, slots, ...]."""

    blocks: Sequence[torch.Tensor]
    slots: Sequence[torch.Tensor]


class TorchHostCopies:
    """`HostCopies` of one rank."""

    def __init__(
        self,
        planes: Planes,
        nbytes: int,
        device: torch.device,
        least: Callable[[int], int] | None = None,
        neighbours: int = 1,
    ) -> None:
        """Take at most `nbytes` of the host's memory; `least`: returns the least of all ranks;
        `neighbours`: ranks that take as much of the same memory, this one included.

        Raises ConfigurationError if the host has less, or it holds not a single block.
        """
        block, slot = _row_bytes(planes.blocks), _row_bytes(planes.slots)
        free = memory.free_bytes() // neighbours  # no rank takes any before all have looked
        if nbytes > free:
            raise ConfigurationError(
                f"--prefix-cache-host-bytes asks for {nbytes >> 20} MiB on a rank, of which the "
                f"host has {free >> 20} for each: lower it"
            )
        blocks, slots = share_room(nbytes, block, slot)
        agree = least or (lambda own: own)
        # Of blocks, and of slots. A stage of a pipeline may have neither attention nor states.
        common = agree(sum(blocks)), agree(sum(slots) if slot else _ANY)
        self.places = common[0], common[1] if common[1] < _ANY else 0
        if not all(common):
            raise ConfigurationError(
                f"--prefix-cache-host-bytes leaves {nbytes} bytes on a rank, but a block takes "
                f"{block} and states {slot}: raise it"
            )
        self._device = device
        self._stream = torch.cuda.Stream(device) if runs_kernels(device) else None
        self._stores = (
            _Store(planes.blocks, _cut_to(blocks, self.places[0]), device),
            _Store(planes.slots, _cut_to(slots, self.places[1]), device),
        )
        # Pinned memory in turns: the host waits if more launches are in flight, which
        # `loop/transfers.py` does not allow.
        self._send = Staging(device).send if is_accelerator(device) else send_plain
        self._begun = self._done = 0
        self._flying: deque[tuple[int, torch.Event]] = deque()  # not known to be over

    @property
    def nbytes(self) -> int:
        """Bytes of the host's memory."""
        return sum(store.nbytes for store in self._stores)

    @property
    def rows(self) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Pieces of the host's memory, [rows, bytes of an item]: of blocks, and of slots.

        What the layers have of an item stands in the order of the planes.
        """
        blocks, slots = self._stores
        return blocks.pieces, slots.pieces

    @property
    def done(self) -> int:
        if self._stream is None:  # what is launched is over, or comes before what comes later
            return self._begun
        while self._flying and self._flying[0][1].query():
            self._done, _ = self._flying.popleft()
        return self._done

    def launch(self, transfers: Sequence[Transfer]) -> None:
        with without_gradients(), self._beside_steps():
            (items,), at = self._send([np.array([each.item for each in transfers], np.int64)]), 0
            for batch in split_transfers(transfers, len(transfers)):
                self._stores[batch.states].copy(batch, items[at : at + len(batch.items)])
                at += len(batch.items)
            self._begun += 1
            if self._stream is not None:
                self._flying.append((self._begun, record_event(self._device)))

    def precede(self, launches: int) -> None:
        """Have the device make so many launches' copies before the steps launched from now on."""
        last = None
        while self._flying and self._flying[0][0] <= launches:
            self._done, last = self._flying.popleft()
        if last is not None:
            torch.cuda.current_stream(self._device).wait_event(last)

    def finish(self) -> None:
        if self._flying:
            self._flying[-1][1].synchronize()
        self._flying.clear()
        self._done = self._begun

    @contextmanager
    def _beside_steps(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield


class _Part(NamedTuple):
    """What some layers have of an item."""

    items: torch.Tensor  # [items, layers, words], a view
    staged: torch.Tensor  # [rows, layers, words], a view of a part of each row


class _Store:
    """Items of one kind, and rows of the host's memory for copies of them."""

    def __init__(
        self, planes: Sequence[torch.Tensor], rows: Sequence[int], device: torch.device
    ) -> None:
        """`rows`: of each piece of the host's memory."""
        row_bytes = _row_bytes(planes)
        pins = is_accelerator(device)
        self._most = _staged_rows(row_bytes)
        self._parts: list[_Part] = []
        self.pieces: list[torch.Tensor] = []
        self._ends: list[int] = []
        if not row_bytes:
            return
        wide = all(_item_bytes(plane) % 8 == 0 for plane in planes)
        word, size = (torch.int64, 8) if wide else (torch.uint8, 1)
        width = row_bytes // size
        self._staged = torch.empty((self._most, width), dtype=word, device=device)
        self.pieces = [torch.empty((count, width), dtype=word, pin_memory=pins) for count in rows]
        self._ends = list(accumulate(rows))
        at = 0
        for plane in planes:
            layers, count = plane.shape[:2]
            items = plane.view(layers, count, -1).view(torch.uint8).view(word).transpose(0, 1)
            end = at + layers * items.shape[2]
            staged = self._staged[:, at:end].unflatten(1, (layers, items.shape[2]))
            self._parts.append(_Part(items, staged))
            at = end

    @property
    def nbytes(self) -> int:
        return sum(_pinned_bytes(piece.nbytes) for piece in self.pieces)

    def copy(self, batch: Batch, items: torch.Tensor) -> None:
        """Launch a batch of copies, by as many rows at a time as are staged.

        `items`: those of the batch, int64 on the device.
        """
        if not self._parts:
            return
        for start in range(0, len(batch.items), self._most):
            some = slice(start, start + self._most)
            index, places = items[some], batch.places[some]
            if batch.back:
                self._bring(places)
            for part in self._parts:
                staged = part.staged[: len(places)]
                if batch.back:
                    part.items.index_copy_(0, index, staged)
                else:
                    staged.copy_(part.items.index_select(0, index))
            if not batch.back:
                self._take(places)

    def _take(self, places: Sequence[int]) -> None:
        for at, run in self._runs(places):
            run.copy_(self._staged[at : at + len(run)], non_blocking=True)

    def _bring(self, places: Sequence[int]) -> None:
        for at, run in self._runs(places):
            self._staged[at : at + len(run)].copy_(run, non_blocking=True)

    def _runs(self, places: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield runs of neighbouring places: where each begins among `places`, and its rows."""
        at = 0
        while at < len(places):
            first = places[at] - 1
            number = bisect_right(self._ends, first)
            end, count = self._ends[number], 1
            while at + count < len(places) and places[at + count] == places[at] + count:
                count += 1
            count = min(count, end - first)
            row = first - (end - len(self.pieces[number]))
            yield at, self.pieces[number][row : row + count]
            at += count


class HostRoom:
    """The host's memory that a runner may take for copies, and what is there after a warm-up."""

    def __init__(self, nbytes: int, device: torch.device, neighbours: int = 1) -> None:
        """`nbytes`: at most; 0: nothing is copied; `neighbours`: see `TorchHostCopies`."""
        self._nbytes = nbytes
        self._device = device
        self._neighbours = neighbours
        self.copies: TorchHostCopies | None = None

    def staging_bytes(self, block_bytes: int, slot_bytes: int) -> int:
        """Return the bytes of the device that copies will take, which are to be left free."""
        if not self._nbytes or not is_accelerator(self._device):
            return 0
        return staging_bytes(block_bytes) + (staging_bytes(slot_bytes) if slot_bytes else 0)

    def close(self) -> None:
        """Give everything back."""
        self.copies = None

    def open(
        self,
        cache: KVCache,
        beside: Sequence[torch.Tensor],
        pool: StatePool | None,
        least: Callable[[int], int] | None,
    ) -> None:
        """Make room for copies of a cache's blocks and of a pool's slots.

        `beside`: what a drafter keeps of tokens, each [blocks * BLOCK_SIZE, ...]. Raises as
        `TorchHostCopies`.
        """
        if not self._nbytes:
            return
        drafted = [each.view(1, cache.blocks, -1) for each in beside]
        states = [] if pool is None else [each[None] for each in pool.tensors]
        planes = Planes([*cache.planes, *drafted], states)
        self.copies = TorchHostCopies(
            *(planes, self._nbytes, self._device, least), neighbours=self._neighbours
        )

    def report(self) -> dict[str, int]:
        """Return what WARMUP_REPLY says of it."""
        if self.copies is None:
            return {}
        blocks, slots = self.copies.places
        return {"host_blocks": blocks, "host_slots": slots, "host_bytes": self.copies.nbytes}

    def precede(self, plan: StepPlan) -> None:
        """Have the copies on which a step relies come before it."""
        if self.copies is not None:
            self.copies.precede(plan.transfers)


def _item_bytes(plane: torch.Tensor) -> int:
    """Return the bytes that one layer has of an item."""
    layers, items = plane.shape[:2]
    return plane.nbytes // (layers * items)


def _row_bytes(planes: Sequence[torch.Tensor]) -> int:
    return sum(plane.shape[0] * _item_bytes(plane) for plane in planes)
