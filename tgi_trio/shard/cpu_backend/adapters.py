"""LoRA adapters for the CPU kernels: packed beside the steps, installed between two of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.ipc.adapters import AdapterOrder
from tgi_trio.model.adapters.sites import EVERYTHING, AdapterScope
from tgi_trio.model.config import ModelConfig
from tgi_trio.model.matrices.references import every_unit
from tgi_trio.shard.adapter_host import LoadedAdapter
from tgi_trio.shard.adapters.parts import AdapterPart, EmbeddedRows
from tgi_trio.shard.adapters.reader import AdapterReader
from tgi_trio.shard.checkpoint.numbers import Floats, to_bfloat16, to_float32
from tgi_trio.shard.cpu_backend.arena import Arena, address
from tgi_trio.shard.cpu_backend.operations.adapted import AdaptedSite, AddedRows, HeadProducts
from tgi_trio.shard.cpu_backend.program import Program
from tgi_trio.shard.cpu_backend.tables import PIECE, SITE
from tgi_trio.shard.cpu_backend.weight_layout import LANES, PANEL, Storage


@dataclass(frozen=True, slots=True)
class _Loaded:
    sha256: bytes
    rank: int
    nbytes: int
    sites: NDArray[np.int64]  # [sites, 6] as `kernels/adapters.py` reads them
    held: Sequence[NDArray[Any]]  # keeps alive what their addresses point to
    embedded: EmbeddedRows | None  # scaled as the model's
    added: AddedRows | None


class CpuAdapters:
    """`AdapterHost` for a program."""

    def __init__(
        self,
        config: ModelConfig,
        program: Program,
        storage: Storage,
        max_rank: int,
        scope: AdapterScope = EVERYTHING,
    ) -> None:
        """`storage`: of A and B, which have the model's dtype; `max_rank`: the highest rank.

        `scope`: what adapters may change, as the program was made for.
        """
        if program.adapted is None:
            raise ValueError("the program was made without adapters")
        self._reader = AdapterReader(config, program.spec, every_unit, max_rank, scope=scope)
        self._operations = program.adapted
        self._storage = storage
        self._installed: dict[int, _Loaded] = {}  # keeps them alive

    def load(self, order: AdapterOrder) -> LoadedAdapter:
        packing = _Packing(self._storage)
        table = np.zeros((len(self._operations.sites), SITE), np.int64)
        with self._reader.open(order) as numbers:
            for i, site in enumerate(self._operations.sites):
                if site.head or not (parts := numbers.sites.get(site.site)):
                    continue
                if site.products is None:
                    table[i] = packing.pack(site, parts)
                else:
                    table[i : i + site.products.heads] = packing.pack_heads(site.products, parts)
        nbytes, embedded = sum(each.nbytes for each in packing.held), numbers.embedded
        if embedded is not None:
            nbytes += embedded.tokens.nbytes + embedded.rows.nbytes
            embedded = EmbeddedRows(embedded.tokens, self._scale(embedded.rows))
        added = None
        if (pair := numbers.looked_up) is not None:
            a: NDArray[Any] = to_bfloat16(pair.a) if self._storage.bf16 else pair.a
            factors = None if pair.gains is None else pair.gains + np.float32(1.0)
            added = AddedRows(a, self._scale(np.ascontiguousarray(pair.b.T)), factors)
            nbytes += added.nbytes
        return _Loaded(numbers.sha256, numbers.rank, nbytes, table, packing.held, embedded, added)

    def _scale(self, rows: Floats) -> Floats:
        """Return embeddings as the operation that looks up the model's would write them."""
        scale = np.array([self._reader.spec.embedding_scale], np.float32)
        if self._storage.bf16:
            rows, scale = (to_float32(to_bfloat16(values)) for values in (rows, scale))
        scaled: Floats = rows * scale
        return scaled

    def install(self, number: int, loaded: LoadedAdapter) -> None:
        if not isinstance(loaded, _Loaded):
            raise TypeError(f"{type(loaded).__name__} was loaded by another host")
        self._installed[number] = loaded
        self._operations.install(number, loaded.sites, loaded.embedded, loaded.added)

    def drop(self, number: int) -> None:
        self._operations.drop(number)
        self._installed.pop(number, None)


class _Packing:
    """Packs the matrices of an adapter, in the order in which steps read them."""

    def __init__(self, storage: Storage) -> None:
        self.held: list[NDArray[Any]] = []
        self._storage = storage
        self._arena = Arena()

    def pack(self, site: AdaptedSite, parts: Sequence[AdapterPart]) -> tuple[int, ...]:
        """Pack everything of a site; return its record, see `kernels/adapters.py`."""
        gains, offsets = self._pack_factors(site, parts)
        if not site.paired and any(part.start % PANEL for part in parts):
            parts = [_join(parts)]
        ranks = [self._whole_steps(len(part.a)) for part in parts]
        starts = np.cumsum([0, *ranks]).tolist()
        a = np.zeros((starts[-1], site.inputs), np.float32)
        for part, start in zip(parts, starts[:-1], strict=True):
            a[start : start + len(part.a)] = part.a
        packed = self._pack_halves(a)
        found = [_gate_and_up(site, parts)] if site.paired else [*_halves(parts)]
        pieces = self._arena.allocate((len(found), PIECE), np.int64)  # prefetched together with B
        self.held.append(pieces)
        for piece, (panel, *halves) in zip(pieces, found, strict=True):
            piece[:] = self._pack_piece(starts, panel, *halves)
        return address(packed), len(packed), address(pieces), len(pieces), gains, offsets

    def pack_heads(self, of: HeadProducts, parts: Sequence[AdapterPart]) -> NDArray[np.int64]:
        """Pack what adapts the products of heads; return a record for each.

        The linear's outputs are, head by head, what keys and then what values have. Keys are
        multiplied by columns of B first and then by A, values the other way round; see
        `torch_backend/layers/adapters/adapted_latents.py`. All heads share A.
        """
        (part,) = parts
        rank, low = len(part.a), -(-len(part.a) // LANES) * LANES
        b = part.b.reshape(of.heads, -1, rank)
        if of.of_keys:
            first = np.zeros((of.heads, low, of.inputs), np.float32)
            first[:, :rank] = b[:, : of.inputs].swapaxes(1, 2)
            packed, second = self._pack_halves(first.reshape(-1, of.inputs)), part.a.T
        else:
            packed, second = self._pack_halves(part.a), b[:, -of.outputs :].reshape(-1, rank)
        piece = self._pack_piece([0], *next(_halves([AdapterPart(part.a, second, 0)])))
        pieces = self._arena.allocate((1 if of.of_keys else of.heads, PIECE), np.int64)
        self.held.append(pieces)
        panels, head = of.outputs // PANEL, np.arange(of.heads)
        pieces[:] = 0, panels, *piece[2:]
        found = np.zeros((of.heads, SITE), np.int64)
        found[:] = address(packed), low // LANES, address(pieces), 1, 0, 0
        if of.of_keys:
            found[:, 0] += head * (packed.nbytes // of.heads)
        else:
            found[:, 2] += head * pieces.strides[0]
            pieces[:, 2] += head * panels * (piece[4] + piece[6]) * LANES * 4
        return found

    def _pack_piece(self, starts: Sequence[int], panel: int, first: _Half, second: _Half) -> Any:
        """Pack B of neighbouring panels from `panel` on; return a piece for `expand`."""
        packed = [self._order(self._padded(each.b)) for each in (first, second)]
        panels, steps = len(packed[0]), [each.shape[1] for each in packed]
        whole = self._arena.allocate((panels, sum(steps), LANES), packed[0].dtype)
        np.concatenate(packed, axis=1, out=whole)
        self.held.append(whole)
        places = [
            number
            for each, count in zip((first, second), steps, strict=True)
            for number in (starts[each.part], count)
        ]
        return panel, panel + panels, address(whole), *places

    def _pack_factors(self, site: AdaptedSite, parts: Sequence[AdapterPart]) -> list[int]:
        """Pack the gains and the offsets of a site; return their addresses, 0 for zeros alone."""
        whole = np.zeros((2, -(-site.outputs // PANEL) * PANEL), np.float32)
        for part in parts:
            if part.gains is not None and part.offsets is not None:
                whole[:, part.start : part.start + len(part.b)] = part.gains, part.offsets
        return [self._pack_vector(site, values) if values.any() else 0 for values in whole]

    def _pack_vector(self, site: AdaptedSite, values: Floats) -> int:
        """Pack a number for each output as panels have them; return its address."""
        packed = self._arena.allocate(values.shape, np.float32)
        packed[:] = values
        if site.paired:  # gate and up are the halves of a panel
            packed[:] = values.reshape(2, -1, LANES).swapaxes(0, 1).reshape(-1)
        self.held.append(packed)
        return address(packed)

    def _pack_halves(self, matrix: Floats) -> NDArray[Any]:
        """Return a matrix [outputs, inputs] packed as half panels."""
        rows = np.zeros((-len(matrix) % LANES, matrix.shape[1]), np.float32)
        ordered = self._order(np.concatenate((matrix, rows)))
        packed = self._arena.allocate(ordered.shape, ordered.dtype)
        packed[:] = ordered
        self.held.append(packed)
        return packed

    def _order(self, matrix: Floats) -> NDArray[Any]:
        """Return half panels as stored: [outputs / 16, steps, 16]."""
        numbers: NDArray[Any] = matrix
        if self._storage.bf16:
            numbers = to_bfloat16(matrix).view(np.uint32)
        shape = len(numbers) // LANES, LANES, numbers.shape[1]
        return numbers.reshape(shape).swapaxes(1, 2)

    def _padded(self, b: Floats) -> Floats:
        """Return [outputs, r] with r padded to whole steps."""
        padded = np.zeros((len(b), self._whole_steps(b.shape[1])), np.float32)
        padded[:, : b.shape[1]] = b
        return padded

    def _whole_steps(self, rank: int) -> int:
        return rank + -rank % self._storage.step


def _join(parts: Sequence[AdapterPart]) -> AdapterPart:
    """Return parts that share panels as one, without gains and offsets, from the first panel on.

    Its B has zeros where a part's A changes nothing.
    """
    b = np.zeros((parts[-1].start + len(parts[-1].b), sum(len(p.a) for p in parts)), np.float32)
    rank = 0
    for part in parts:
        b[part.start : part.start + len(part.b), rank : rank + len(part.a)] = part.b
        rank += len(part.a)
    return AdapterPart(np.concatenate([part.a for part in parts]), b, 0)


@dataclass(frozen=True, slots=True)
class _Half:
    """B of the first or the second halves of some panels."""

    part: int  # the part whose A it belongs to
    b: Floats  # [16 panels, r]; r may be 0


def _halves(parts: Sequence[AdapterPart]) -> Iterator[tuple[int, _Half, _Half]]:
    """Yield each part's first panel and both halves of its panels."""
    for number, part in enumerate(parts):
        # gates of heads may not fill a panel
        rows = np.zeros((-len(part.b) % PANEL, part.b.shape[1]), np.float32)
        b = np.concatenate((part.b, rows)).reshape(-1, 2, LANES, part.b.shape[1])
        first, second = (_Half(number, b[:, i].reshape(-1, b.shape[-1])) for i in range(2))
        yield part.start // PANEL, first, second


def _gate_and_up(site: AdaptedSite, parts: Sequence[AdapterPart]) -> tuple[int, _Half, _Half]:
    """Return the same for a gated unit, whose panels have gate and up as their halves."""
    width = site.outputs // 2
    halves = [_Half(0, np.zeros((width, 0), np.float32))] * 2
    for number, part in enumerate(parts):
        for i in range(2):
            own = part.b[max(0, i * width - part.start) : max(0, (i + 1) * width - part.start)]
            if len(own):
                halves[i] = _Half(number, own)
    return 0, halves[0], halves[1]
