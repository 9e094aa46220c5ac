"""Packs weights into the kernels' panels: floating-point numbers, int8, or a checkpoint's codes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import ModelLoadError
from tgi_trio.shard.checkpoint.formats.int8 import Int8Matrix
from tgi_trio.shard.checkpoint.numbers import Floats, to_bfloat16, to_float32
from tgi_trio.shard.checkpoint.stored_matrix import Stack, StoredMatrix
from tgi_trio.shard.cpu_backend.arena import Arena
from tgi_trio.shard.cpu_backend.fillers.blocks import READERS
from tgi_trio.shard.cpu_backend.fillers.filler import Filler, find_filler
from tgi_trio.shard.cpu_backend.kinds.kind import (
    E4M3_NO_NUMBER,
    Array,
    Codes,
    Kind,
    fill_panels,
)
from tgi_trio.shard.cpu_backend.kinds.packing import Packing
from tgi_trio.shard.cpu_backend.weight_layout import PANEL, Storage

_JOB_BYTES = 4 << 20  # bytes of panels that a job fills
_INT8_JOB_BYTES = 128 << 10  # the same for int8, which stays in the cache until it is transposed
_CODES_AT_ONCE = 256 << 10  # weights that a job packs with numpy, in its cache
_BLOCKS_AT_ONCE = 1 << 20  # weights of blocks that a job packs with a filler, which reads them once
_UNITS = {"float32": np.float32, "bfloat16": np.uint32, "int8": np.int8}  # the dtype of a panel


def to_storage(values: NDArray[Any], bf16: bool) -> NDArray[Any]:
    """Return values as weights are stored; a view if nothing changes."""
    return np.ascontiguousarray(to_bfloat16(values) if bf16 else to_float32(values))


@dataclass(frozen=True, slots=True)
class _Job:
    panels: NDArray[Any]
    scales: Floats | None
    rows: StoredMatrix

    def place(self) -> tuple[Path, int]:
        return self.rows.place()

    def run(self, bf16: bool) -> None:
        if self.scales is None:
            _copy(self.panels, self.rows.dequantised(), bf16)
        else:
            planes = self.rows.planes()
            _transpose(self.panels, planes["codes"])
            # like those of one input feature
            _transpose(self.scales[:, None], planes["scales"][:, None])
        self.rows.release()


@dataclass(frozen=True, slots=True)
class _CodesJob:
    """Packs one matrix, or the gate and up of a gated unit."""

    panels: NDArray[np.uint8]
    packing: Packing
    rows: Sequence[StoredMatrix]
    filler: Future[Filler | None]

    def place(self) -> tuple[Path, int]:
        return self.rows[0].place()

    def run(self, bf16: bool) -> None:
        planes = [part.planes() for part in self.rows]
        if (filler := self.filler.result()) is None:
            self._fill(planes)
        elif not filler.fill(self.panels, [own["blocks"] for own in planes]):
            raise _no_number(self.rows[0])
        for part in self.rows:
            part.release()

    def _fill(self, planes: Sequence[Mapping[str, Array]]) -> None:
        """Pack with numpy, in several passes."""
        read, arrange = self.packing.stored.read, self.packing.arrange
        found = [arrange(read(own)) for own in planes]
        codes = found[0] if len(found) == 1 else interleave_codes(*found)
        check_codes(self.rows[0], self.packing.kind, codes)
        fill_panels(self.panels, self.packing.kind, codes, self.packing.span)


class Packer:
    """Packs weights into panels on several threads. A context manager.

    The arrays that `pack` returns are filled after `start`, and complete when the block ends. Jobs
    run in the order of the file, so that they follow its readahead. Copying is bound by memory and
    by page faults, and numpy releases the GIL.
    """

    def __init__(self, storage: Storage, threads: int) -> None:
        self._storage = storage
        self._arena = Arena()
        self._pool = ThreadPoolExecutor(threads, "packer")
        self._jobs: list[_Job | _CodesJob] = []
        self._under_way: list[Future[None]] = []
        self._fillers: dict[str, Future[Filler | None]] = {}  # by coding

    @property
    def rounds(self) -> bool:
        """Whether `pack` rounds weights to 8 bits."""
        return self._storage.int8

    def __enter__(self) -> Packer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._pool.shutdown(cancel_futures=kind is not None)
        if kind is None:
            for job in self._under_way:
                job.result()

    def start(self) -> None:
        """Submit all jobs given to `pack`."""
        self._jobs.sort(key=lambda job: job.place())
        bf16 = self._storage.bf16
        self._under_way += [self._pool.submit(job.run, bf16) for job in self._jobs]
        self._jobs.clear()

    def pack(self, weights: Stack, *, paired: bool = False) -> tuple[NDArray[Any], Floats | None]:
        """Return weights [out, in], stacked, as panels; see `kernels/linear.py`.

        float32 and int8: [out / 32, in, 32]; bfloat16: uint32 [out / 32, in / 2, 32], each a pair
        of input features. int8 has scales, float32 [out / 32, 32]. `in` is a multiple of 16, and
        `out` of 32 except for the last part, which is padded with zeros. `paired`: two parts of the
        same size, interleaved as by `interleave`. ModelLoadError of `dequantised` and `planes` is
        raised when the block ends.
        """
        parts = [Int8Matrix(part) if self._storage.int8 else part for part in weights.parts]
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

    def pack_codes(
        self, parts: Sequence[StoredMatrix], packing: Packing, *, paired: bool = False
    ) -> NDArray[np.uint8]:
        """Return matrices of one kind, stacked, as panels uint8 [out / 32, bytes].

        They are filled as for `pack`; `kinds/kind.py` describes panels.
        """
        inputs = packing.count_inputs(parts[0].shape[1])
        lanes = PANEL // 2 if paired else PANEL
        counts = [-(-part.shape[0] // lanes) for part in parts]
        size = packing.kind.panel_bytes(inputs, packing.span)
        count = counts[0] if paired else sum(counts)
        panels = self._arena.allocate((count, size), np.uint8)
        filler, coding = self._find_filler(parts[0].coding), parts[0].coding
        most = _BLOCKS_AT_ONCE if coding in READERS else _CODES_AT_ONCE
        step = max(1, most // (PANEL * inputs))
        together = [parts] if paired else [[part] for part in parts]
        first = 0
        for own, own_count in zip(together, counts, strict=False):
            for begin in range(0, own_count, step):
                end = min(begin + step, own_count)
                rows = [part.rows(slice(begin * lanes, end * lanes)) for part in own]
                part = panels[first + begin : first + end]
                self._jobs.append(_CodesJob(part, packing, rows, filler))
            first += own_count
        return panels

    def _find_filler(self, coding: str) -> Future[Filler | None]:
        """Have the filler for a coding compiled or loaded.

        It is submitted before all jobs that wait for it, so no job waits for one that has not
        begun.
        """
        if coding not in self._fillers:
            self._fillers[coding] = self._pool.submit(find_filler, coding)
        return self._fillers[coding]

    def _fill(self, panels: NDArray[Any], scales: Floats | None, rows: StoredMatrix) -> None:
        """Add jobs that fill `panels` [count, in, lanes] with rows [count * lanes, in].

        Scales go to `scales` [count, lanes].
        """
        lanes = panels.shape[2]
        most = _INT8_JOB_BYTES if self._storage.int8 else _JOB_BYTES
        step = max(1, most // panels[0].nbytes)
        for begin in range(0, len(panels), step):
            piece = rows.rows(slice(begin * lanes, (begin + step) * lanes))
            part = slice(begin, begin + step)
            own = None if scales is None else scales[part]
            self._jobs.append(_Job(panels[part], own, piece))


def check_codes(matrix: StoredMatrix, kind: Kind, codes: Codes) -> None:
    """Raise ModelLoadError for numbers in heads, or codes, that are not finite."""
    if kind.floating == "e4m3" and (codes.codes & E4M3_NO_NUMBER == E4M3_NO_NUMBER).any():
        raise ModelLoadError(f"{matrix.place()[0]} holds a weight that is not a number.")
    for numbers in codes.numbers.values():
        if numbers.dtype.kind == "f" and not np.isfinite(numbers).all():
            raise _no_number(matrix)


def _no_number(matrix: StoredMatrix) -> ModelLoadError:
    file = matrix.place()[0]
    return ModelLoadError(f"{file} holds a scale that is infinite or not a number.")


def interleave_codes(gate: Codes, up: Codes) -> Codes:
    """Return gate's and up's codes, interleaved as by `interleave`."""
    numbers = {name: interleave(values, up.numbers[name]) for name, values in gate.numbers.items()}
    return Codes(interleave(gate.codes, up.codes), numbers, gate.table)


def _copy(panels: NDArray[Any], rows: NDArray[Any], bf16: bool) -> None:
    values = to_storage(rows, bf16)
    _transpose(panels, values.view(np.uint32) if bf16 else values)


def _transpose(target: NDArray[Any], values: NDArray[Any]) -> None:
    """Fill `target` [panels, in, lanes] with values [rows, in], as far as there are rows."""
    inputs, lanes = target.shape[1:]
    whole, rest = divmod(len(values), lanes)
    panels = values[: whole * lanes].reshape(whole, lanes, inputs)
    np.copyto(target[:whole], panels.swapaxes(1, 2))
    if rest:
        target[whole, :, :rest] = values[whole * lanes :].T


def interleave(gate: NDArray[Any], up: NDArray[Any]) -> NDArray[Any]:
    """Return [2 * width, ...]: 16 rows of `gate`, 16 of `up`, and so on.

    So both inputs of a gated unit come from the same panel. `width` is a multiple of 16.
    """
    half = PANEL // 2
    parts = [part.reshape(-1, half, *part.shape[1:]) for part in (gate, up)]
    return np.stack(parts, axis=1).reshape(2 * len(gate), *gate.shape[1:])
