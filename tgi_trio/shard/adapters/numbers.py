"""A rank's part of an adapter's weights: y += B (A x), with the scale in B.

Columns of A and rows of B are divided as the model's own weights are (`model/split.py`). Where a
linear's inputs are divided, every rank has all of B: the adapter's output is then in the partial
sums that the ranks reduce anyway, so adapters need no communication of their own.

An adapter is read beside the steps, by a thread that shares their interpreter and cores. It reads
module by module as these are asked for, and sleeps between short pieces of work: the scheduler
favours a thread that sleeps often, so it is not preempted in the middle of a piece while the steps
wait for the interpreter.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.adapters.files import Adapter, Pair, read_adapter
from tgi_trio.model.adapters.sites import AdaptedLinear, Site, map_adapter
from tgi_trio.model.checkpoint_files import StoredTensor
from tgi_trio.model.matrices.references import Share
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.shard.checkpoint.numbers import Floats, to_float32

_PIECE_S: Final = 0.0005  # seconds of work after which the reader sleeps
_REST_S: Final = 0.0002
_KINDS: Final = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


@dataclass(frozen=True, slots=True)
class AdapterPart:
    """The addition to a run of a linear's outputs: B (A x)."""

    a: Floats  # [r, inputs of this rank]
    b: Floats  # [outputs, r], scaled
    start: int  # the first of these outputs among the linear's of this rank


@dataclass(frozen=True, slots=True)
class AdapterNumbers:
    """One rank's part of an adapter."""

    sha256: bytes  # of its files
    rank: int  # the largest rank of its modules
    sites: Mapping[Site, tuple[AdapterPart, ...]]  # each is read when it is asked for


def read_adapter_numbers(
    folder: Path,
    spec: DecoderSpec,
    share: Share,
    *,
    max_rank: int,
    expected: bytes = b"",
) -> AdapterNumbers:
    """Read a rank's `share` of an adapter.

    `expected`: the sha256 of the files as read before; b"": any. Raises ModelLoadError as
    `read_adapter` and `map_adapter` do, and if the files have changed; reading its `sites` raises
    it for tensors with infinite values or NaN.
    """
    adapter = read_adapter(folder)
    mapped = map_adapter(adapter, spec, max_rank)
    contents = [_read_bytes(path) for path in adapter.files]
    digest = hashlib.sha256(b"".join(hashlib.sha256(each).digest() for each in contents)).digest()
    if expected and digest != expected:
        raise ModelLoadError(
            f"the files in {folder} are not those that were loaded before: an answer cannot go on "
            "in another voice. Load them under another name"
        )
    return AdapterNumbers(digest, adapter.rank, _Sites(adapter, mapped, contents[1], share))


class _Sites(Mapping[Site, tuple[AdapterPart, ...]]):
    """A rank's part of an adapter, read module by module from its mapped file."""

    def __init__(
        self,
        adapter: Adapter,
        mapped: Mapping[Site, AdaptedLinear],
        content: bytes,
        share: Share,
    ) -> None:
        self._adapter = adapter
        self._mapped = mapped
        self._content = content
        self._share = share
        self._rested = time.perf_counter()

    def __getitem__(self, site: Site) -> tuple[AdapterPart, ...]:
        """Raises ModelLoadError, naming the tensor, for infinite values and NaN."""
        linear = self._mapped[site]
        numbers = {}
        for pair in linear.pairs:
            self._rest()
            if pair is not None and pair.module not in numbers:
                numbers[pair.module] = _read_pair(self._adapter, pair, self._content)
        return _cut(linear, numbers, self._share)

    def __iter__(self) -> Iterator[Site]:
        return iter(self._mapped)

    def __len__(self) -> int:
        return len(self._mapped)

    def _rest(self) -> None:
        if time.perf_counter() - self._rested > _PIECE_S:
            time.sleep(_REST_S)
            self._rested = time.perf_counter()


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error


def _read_pair(adapter: Adapter, pair: Pair, content: bytes) -> tuple[Floats, Floats]:
    """Return A and B whole, B scaled."""
    a, b = (
        _read_tensor(adapter, name, tensor, content)
        for name, tensor in zip(pair.names, (pair.a, pair.b), strict=True)
    )
    with np.errstate(over="ignore"):
        scaled = b * np.float32(pair.scale)
    if not np.isfinite(scaled).all():
        raise ModelLoadError(
            f"{pair.names[1]} of {adapter.folder} times its scale {pair.scale:g} is not finite"
        )
    return a, scaled


def _read_tensor(adapter: Adapter, name: str, tensor: StoredTensor, content: bytes) -> Floats:
    kind, count = np.dtype(_KINDS[tensor.dtype]), tensor.shape[0] * tensor.shape[1]
    if tensor.first + count * kind.itemsize > len(content):
        raise ModelLoadError(f"{tensor.file} has changed while it was read: {name} is cut off")
    raw = np.frombuffer(content, kind, count, tensor.first)
    values = to_float32(raw).reshape(tensor.shape).copy()  # else a view of what is read alone
    if not np.isfinite(values).all():
        raise ModelLoadError(f"{name} of {adapter.folder} holds numbers that are infinite or none")
    return values


def _cut(
    adapted: AdaptedLinear, numbers: Mapping[str, tuple[Floats, Floats]], share: Share
) -> tuple[AdapterPart, ...]:
    """Return this rank's part, with adjacent pieces of one pair joined."""
    parts: list[AdapterPart] = []
    before: Pair | None = None
    start = 0
    for piece, pair in zip(adapted.linear.pieces, adapted.pairs, strict=True):
        spans = piece.outputs.spans(share(piece.outputs))
        count = sum(span.stop - span.start for span in spans)
        if pair is not None:
            (columns,) = piece.inputs.spans(share(piece.inputs))
            a, b = numbers[pair.module]
            rows = np.concatenate([b[span] for span in spans])
            if pair is before:
                last = parts.pop()
                parts.append(AdapterPart(last.a, np.concatenate((last.b, rows)), last.start))
            else:
                parts.append(AdapterPart(np.ascontiguousarray(a[:, columns]), rows, start))
        before = pair
        start += count
    return tuple(parts)
