"""LoRA adapters for the CPU kernels: packed beside the steps, installed between two of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.ipc.adapters import AdapterOrder
from tgi_trio.model.matrices import every_unit
from tgi_trio.shard.adapters.numbers import AdapterPart, read_adapter_numbers
from tgi_trio.shard.checkpoint.numbers import Floats, to_bfloat16
from tgi_trio.shard.contract import LoadedAdapter
from tgi_trio.shard.numba_backend.adapted_operations import AdaptedSite
from tgi_trio.shard.numba_backend.arena import address, allocate_zeroed
from tgi_trio.shard.numba_backend.kernels.adapters import HALF, SITE
from tgi_trio.shard.numba_backend.program import Program
from tgi_trio.shard.numba_backend.weight_layout import LANES, Storage

_STEP_BYTES = 64  # of half a panel


@dataclass(frozen=True, slots=True)
class _Loaded:
    sha256: bytes
    rank: int
    nbytes: int
    sites: NDArray[np.int64]  # [sites, 3] as `kernels/adapters.py` reads them
    held: Sequence[NDArray[Any]]  # what their addresses point into


class NumbaAdapters:
    """Implements `AdapterHost` for a program."""

    def __init__(self, program: Program, storage: Storage, max_rank: int) -> None:
        """`storage`: of A and B, the model's dtype; `max_rank`: of adapters."""
        if program.adapted is None:
            raise ValueError("the program was made without adapters")
        self._spec = program.spec
        self._operations = program.adapted
        self._storage = storage
        self._max_rank = max_rank
        self._installed: dict[int, _Loaded] = {}  # keeps them alive

    def load(self, order: AdapterOrder) -> LoadedAdapter:
        numbers = read_adapter_numbers(
            order.folder, self._spec, every_unit, max_rank=self._max_rank, expected=order.sha256
        )
        held: list[NDArray[Any]] = []
        table = np.zeros((len(self._operations.sites), SITE), np.int64)
        for facts, site in zip(table, self._operations.sites, strict=True):
            if parts := numbers.sites.get(site.site):
                facts[:] = self._pack(site, parts, held)
        return _Loaded(numbers.sha256, numbers.rank, sum(each.nbytes for each in held), table, held)

    def install(self, number: int, loaded: LoadedAdapter) -> None:
        if not isinstance(loaded, _Loaded):
            raise TypeError(f"{type(loaded).__name__} was loaded by another host")
        self._installed[number] = loaded
        self._operations.install(number, loaded.sites)

    def drop(self, number: int) -> None:
        self._operations.drop(number)
        self._installed.pop(number, None)

    def _pack(
        self, site: AdaptedSite, parts: Sequence[AdapterPart], held: list[NDArray[Any]]
    ) -> tuple[int, int, int]:
        """Pack A and B of a site into `held`; return its facts, see `kernels/adapters.py`."""
        step = self._storage.step
        ranks = [-(-len(part.a) // step) * step for part in parts]  # whole steps of B
        starts = np.cumsum([0, *ranks])
        a = np.zeros((int(starts[-1]), site.inputs), np.float32)
        halves = np.zeros((site.outputs // LANES, HALF), np.int64)
        for part, start, rank in zip(parts, starts[:-1].tolist(), ranks, strict=True):
            a[start : start + len(part.a)] = part.a
            b = np.zeros((len(part.b), rank), np.float32)
            b[:, : part.b.shape[1]] = part.b
            packed = self._pack_halves(b)
            held.append(packed)
            first = address(packed)
            for i in range(len(packed)):
                facts = first + i * packed[0].nbytes, start, rank // step
                halves[_place(site, part.start // LANES + i)] = facts
        packed = self._pack_halves(a)
        held += [packed, halves]
        return address(packed), len(packed), address(halves)

    def _pack_halves(self, matrix: Floats) -> NDArray[Any]:
        """Return a matrix [outputs, inputs] as halves of panels: [outputs / 16, steps, 16]."""
        rows, inputs = matrix.shape
        count = -(-rows // LANES)
        if self._storage.bf16:
            numbers: NDArray[Any] = to_bfloat16(matrix).view(np.uint32)
        else:
            numbers = matrix
        steps = inputs // self._storage.step
        packed = allocate_zeroed((count, steps, LANES), numbers.dtype)
        for half in range(count):
            own = numbers[half * LANES : (half + 1) * LANES]
            packed[half, :, : len(own)] = own.T
        return packed


def _place(site: AdaptedSite, half: int) -> int:
    """Return which half of a panel has the outputs `half` * 16 and on of a linear."""
    if not site.paired:
        return half
    width = site.outputs // 2 // LANES  # gate and up lie in turns
    return 2 * half if half < width else 2 * (half - width) + 1
