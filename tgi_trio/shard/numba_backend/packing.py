"""Weights in the layouts the kernels read: panels of plain numbers, or of 8 bits with scales."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.checkpoint.formats.int8 import RoundedMatrix
from tgi_trio.shard.checkpoint.numbers import Floats, to_bfloat16, to_float32
from tgi_trio.shard.checkpoint.stored_matrix import Stack, StoredMatrix
from tgi_trio.shard.numba_backend.arena import Arena
from tgi_trio.shard.numba_backend.weight_layout import PANEL, Storage

_JOB_BYTES = 4 << 20  # of panels that a thread fills at a time
_INT8_JOB_BYTES = 128 << 10  # the same of int8, which stays in the cache until it is transposed
_UNITS = {"float32": np.float32, "bfloat16": np.uint32, "int8": np.int8}  # of a panel


def to_storage(values: NDArray[Any], bf16: bool) -> NDArray[Any]:
    """Return values as weights are stored; a view where nothing changes."""
    return np.ascontiguousarray(to_bfloat16(values) if bf16 else to_float32(values))


@dataclass(frozen=True, slots=True)
class _Job:
    panels: NDArray[Any]
    scales: Floats | None
    rows: StoredMatrix


class Packer:
    """Weights on their way into panels, by several threads at once. A context manager.

    What `pack` returns is filled after `start`, when the block is left. All goes in the order of
    the file, behind its reading. Copying is bound by memory and by the pages it touches first, and
    numpy lets other threads run meanwhile.
    """

    def __init__(self, storage: Storage, threads: int) -> None:
        self._storage = storage
        self._arena = Arena()
        self._pool = ThreadPoolExecutor(threads, "packer")
        self._jobs: list[_Job] = []
        self._under_way: list[Future[None]] = []

    def __enter__(self) -> Packer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._pool.shutdown(cancel_futures=kind is not None)
        if kind is None:
            for job in self._under_way:
                job.result()

    def start(self) -> None:
        """Begin with what has been given to `pack`."""
        self._jobs.sort(key=lambda job: job.rows.place())
        self._under_way += [self._pool.submit(self._do, job) for job in self._jobs]
        self._jobs.clear()

    def _do(self, job: _Job) -> None:
        if job.scales is None:
            _copy(job.panels, job.rows.dequantised(), self._storage.bf16)
        else:
            planes = job.rows.planes()
            _transpose(job.panels, planes["codes"])
            _transpose(job.scales[:, None], planes["scales"][:, None])  # as of one input feature
        job.rows.release()

    def pack(self, weights: Stack, *, paired: bool = False) -> tuple[NDArray[Any], Floats | None]:
        """Return weights [out, in], one below the other, as panels; see `kernels/linear.py`.

        float32 and int8: [out / 32, in, 32], bfloat16: uint32 [out / 32, in / 2, 32], a pair of
        input features in each. int8 has scales, float32 [out / 32, 32]. `in` is a multiple of 16,
        as is `out` of 32 but for the last part, which is padded with zeros. `paired`: two parts of
        one size, interleaved as by `interleave`. Raises ModelLoadError as `dequantised`
        and `planes` do, where the block is left.
        """
        parts = [RoundedMatrix(part) if self._storage.int8 else part for part in weights.parts]
        outputs, inputs = weights.shape
        inputs //= 2 if self._storage.bf16 else 1
        count = -(-outputs // PANEL)
        panels = self._arena.allocate((count, inputs, PANEL), _UNITS[self._storage.numbers])
        scales = np.zeros((count, PANEL), np.float32) if self._storage.int8 else None
        if paired:
            half = PANEL // 2
            for place, part in zip((slice(half), slice(half, PANEL)), parts, strict=True):
                own = None if scales is None else scales[:, place]
                self._fill(panels[:, :, place], own, part)
            return panels, scales
        first = 0
        for part in parts:
            end = first + -(-part.shape[0] // PANEL)
            own = None if scales is None else scales[first:end]
            self._fill(panels[first:end], own, part)
            first = end
        return panels, scales

    def _fill(self, panels: NDArray[Any], scales: Floats | None, rows: StoredMatrix) -> None:
        """Fill `panels` [count, in, lanes] with rows [count * lanes, in], a piece per job.

        Their scales go to `scales` [count, lanes].
        """
        lanes = panels.shape[2]
        most = _INT8_JOB_BYTES if self._storage.int8 else _JOB_BYTES
        step = max(1, most // panels[0].nbytes)
        for begin in range(0, len(panels), step):
            piece = rows.rows(slice(begin * lanes, (begin + step) * lanes))
            part = slice(begin, begin + step)
            own = None if scales is None else scales[part]
            self._jobs.append(_Job(panels[part], own, piece))


def _copy(panels: NDArray[Any], rows: NDArray[Any], bf16: bool) -> None:
    values = to_storage(rows, bf16)
    _transpose(panels, values.view(np.uint32) if bf16 else values)


def _transpose(target: NDArray[Any], values: NDArray[Any]) -> None:
    """Fill `target` [panels, in, lanes] with values [rows, in], as many rows as there are."""
    inputs, lanes = target.shape[1:]
    whole, rest = divmod(len(values), lanes)
    panels = values[: whole * lanes].reshape(whole, lanes, inputs)
    np.copyto(target[:whole], panels.swapaxes(1, 2))
    if rest:
        target[whole, :, :rest] = values[whole * lanes :].T


def interleave(gate: NDArray[Any], up: NDArray[Any]) -> NDArray[Any]:
    """Return [2 * width, ...]: 16 rows of `gate`, 16 of `up`, and so on.

    Both halves of a gated unit then come out of the same panel. `width` is a multiple of 16.
    """
    half = PANEL // 2
    parts = [part.reshape(-1, half, *part.shape[1:]) for part in (gate, up)]
    return np.stack(parts, axis=1).reshape(2 * len(gate), *gate.shape[1:])
