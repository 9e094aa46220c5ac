"""Weights in the layouts the kernels read. bfloat16 is held as uint16, its bits.

int8 weights are quantised on the way: symmetrically, with a scale for every output feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import ModelLoadError
from tgi_trio.shard.cpu.memory import Arena
from tgi_trio.shard.cpu.storage import PANEL, Storage

Floats = NDArray[np.float32]

_JOB_BYTES = 4 << 20  # of panels that a thread fills at a time
_INT8_JOB_BYTES = 128 << 10  # the same of int8, which stays in the cache until it is transposed
# Weights that are float32 at a time on their way to int8: in the cache, and in memory that malloc
# keeps. What is larger goes back to the system each time, and comes again page by page.
_ROUNDED_AT_ONCE = 24 << 10
_UNITS = {"float32": np.float32, "bfloat16": np.uint32, "int8": np.int8}  # of a panel


def to_float32(values: NDArray[Any]) -> Floats:
    """Return float32 of what a checkpoint holds: float32, float16, or uint16 for bfloat16."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(values, np.float32)


def to_bfloat16(values: NDArray[Any]) -> NDArray[np.uint16]:
    """Return the bits of the nearest bfloat16 numbers, the even one from half-way."""
    if values.dtype == np.uint16:
        return values
    bits = to_float32(values).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.astype(np.uint16)


def stored(values: NDArray[Any], bf16: bool) -> NDArray[Any]:
    """Return values as weights are stored; a view where nothing changes."""
    return np.ascontiguousarray(to_bfloat16(values) if bf16 else to_float32(values))


def to_int8(values: NDArray[Any]) -> tuple[NDArray[np.int8], Floats]:
    """Return int8 [out, in] and scales [out], whose products are near `values` [out, in].

    The largest weight of a row becomes 127 or -127, the others the nearest whole numbers. Raises
    ModelLoadError for a weight that is no number.
    """
    whole = np.empty(values.shape, np.int8)
    scales = np.empty(len(values), np.float32)
    step = max(1, _ROUNDED_AT_ONCE // values.shape[1])
    for begin in range(0, len(values), step):
        rows = slice(begin, begin + step)
        whole[rows], scales[rows] = _rounded(to_float32(values[rows]))
    return whole, scales


def _rounded(exact: Floats) -> tuple[Floats, Floats]:
    """Return whole numbers [rows, in] and scales [rows], see `to_int8`."""
    largest = np.maximum(exact.max(axis=1), -exact.min(axis=1))
    if not np.isfinite(largest).all():
        raise ModelLoadError(
            "A weight of the checkpoint is infinite or not a number, so it has no 8-bit form; "
            "leave --quantize out to serve the weights as they are."
        )
    scales = np.maximum(largest / np.float32(127), np.finfo(np.float32).tiny)  # never 0
    whole = exact / scales[:, None]
    return np.rint(whole, out=whole), scales


class Source(Protocol):
    """What rows of weights are views of."""

    def place(self, values: NDArray[Any]) -> tuple[Path, int]:
        """Return where they are: reading goes on in this order."""

    def release(self, values: NDArray[Any]) -> None:
        """Take note that they have been read for the last time; called by any thread."""


@dataclass(frozen=True, slots=True)
class _Job:
    panels: NDArray[Any]
    scales: Floats | None
    rows: NDArray[Any]


class Packer:
    """Weights on their way into panels, by several threads at once. A context manager.

    What `pack` returns is filled after `start`, when the block is left. All goes in the order of
    the file, behind its reading. Copying is bound by memory and by the pages it touches first, and
    numpy lets other threads run meanwhile.
    """

    def __init__(self, source: Source, storage: Storage, threads: int) -> None:
        self._source = source
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
        self._jobs.sort(key=lambda job: self._source.place(job.rows))
        self._under_way += [self._pool.submit(self._do, job) for job in self._jobs]
        self._jobs.clear()

    def _do(self, job: _Job) -> None:
        if job.scales is None:
            _copy(job.panels, job.rows, self._storage.bf16)
        else:
            _quantise(job.panels, job.scales, job.rows)
        self._source.release(job.rows)

    def pack(
        self, parts: Sequence[NDArray[Any]], *, paired: bool = False
    ) -> tuple[NDArray[Any], Floats | None]:
        """Return weights [out, in], one below the other, as panels; see `kernels/linear.py`.

        float32 and int8: [out / 32, in, 32], bfloat16: uint32 [out / 32, in / 2, 32], a pair of
        input features in each. int8 has scales, float32 [out / 32, 32]. `in` is a multiple of 16,
        as is `out` of 32 but for the last part, which is padded with zeros. `paired`: two parts of
        one size, interleaved as by `interleave`. Raises ModelLoadError as `to_int8` does, where
        the block is left.
        """
        inputs = parts[0].shape[1] // (2 if self._storage.bf16 else 1)
        count = -(-sum(map(len, parts)) // PANEL)
        panels = self._arena.zeroed((count, inputs, PANEL), _UNITS[self._storage.numbers])
        scales = np.zeros((count, PANEL), np.float32) if self._storage.int8 else None
        if paired:
            half = PANEL // 2
            for place, part in zip((slice(half), slice(half, PANEL)), parts, strict=True):
                own = None if scales is None else scales[:, place]
                self._fill(panels[:, :, place], own, part)
            return panels, scales
        first = 0
        for part in parts:
            end = first + -(-len(part) // PANEL)
            own = None if scales is None else scales[first:end]
            self._fill(panels[first:end], own, part)
            first = end
        return panels, scales

    def _fill(self, panels: NDArray[Any], scales: Floats | None, rows: NDArray[Any]) -> None:
        """Fill `panels` [count, in, lanes] with rows [count * lanes, in], a piece per job.

        Their scales go to `scales` [count, lanes].
        """
        lanes = panels.shape[2]
        most = _INT8_JOB_BYTES if self._storage.int8 else _JOB_BYTES
        step = max(1, most // panels[0].nbytes)
        for begin in range(0, len(panels), step):
            piece = rows[begin * lanes : (begin + step) * lanes]
            part = slice(begin, begin + step)
            own = None if scales is None else scales[part]
            self._jobs.append(_Job(panels[part], own, piece))


def _quantise(panels: NDArray[np.int8], scales: Floats, rows: NDArray[Any]) -> None:
    values, found = to_int8(rows)
    _transpose(panels, values)
    _transpose(scales[:, None], found[:, None])  # as of one input feature


def _copy(panels: NDArray[Any], rows: NDArray[Any], bf16: bool) -> None:
    values = stored(rows, bf16)
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
