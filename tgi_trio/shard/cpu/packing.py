"""Weights in the layouts the kernels read. bfloat16 is held as uint16, its bits."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.cpu.kernels.variant import PANEL
from tgi_trio.shard.cpu.memory import Arena

Floats = NDArray[np.float32]

_JOB_BYTES = 4 << 20  # of panels that a thread fills at a time


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


class Packer:
    """Weights on their way into panels, by several threads at once. A context manager.

    What `pack` returns is filled when the block is left, not before. Copying is bound by memory
    and by the pages it touches first, and numpy lets other threads run meanwhile.
    """

    def __init__(self, bf16: bool, threads: int) -> None:
        self._bf16 = bf16
        self._arena = Arena()
        self._pool = ThreadPoolExecutor(threads, "packer")
        self._under_way: list[Future[None]] = []

    def __enter__(self) -> Packer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._pool.shutdown(cancel_futures=kind is not None)
        if kind is None:
            for part in self._under_way:
                part.result()

    def pack(self, parts: Sequence[NDArray[Any]], *, paired: bool = False) -> NDArray[Any]:
        """Return weights [out, in], one below the other, as panels; see `kernels/linear.py`.

        bfloat16: uint32 [out / 32, in / 2, 32], a pair of input features in each; float32:
        [out / 32, in, 32]. `in` is a multiple of 16, as is `out` of 32 but for the last part, which
        is padded with zeros. `paired`: two parts of one size, interleaved as by `interleave`.
        """
        inputs = parts[0].shape[1] // (2 if self._bf16 else 1)
        count = -(-sum(map(len, parts)) // PANEL)
        kind = np.uint32 if self._bf16 else np.float32
        panels = self._arena.zeroed((count, inputs, PANEL), kind)
        if paired:
            half = PANEL // 2
            for place, part in zip((slice(half), slice(half, PANEL)), parts, strict=True):
                self._fill(panels[:, :, place], part)
            return panels
        first = 0
        for part in parts:
            end = first + -(-len(part) // PANEL)
            self._fill(panels[first:end], part)
            first = end
        return panels

    def _fill(self, target: NDArray[Any], rows: NDArray[Any]) -> None:
        """Fill `target` [panels, in, lanes] with rows [panels * lanes, in], a piece per job."""
        lanes = target.shape[2]
        step = max(1, _JOB_BYTES // target[0].nbytes)
        for begin in range(0, len(target), step):
            piece = rows[begin * lanes : (begin + step) * lanes]
            job = self._pool.submit(_copy, target[begin : begin + step], piece, self._bf16)
            self._under_way.append(job)


def _copy(target: NDArray[Any], rows: NDArray[Any], bf16: bool) -> None:
    values = stored(rows, bf16)
    if bf16:
        values = values.view(np.uint32)
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
