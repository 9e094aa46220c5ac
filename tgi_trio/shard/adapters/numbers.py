"""A rank's part of an adapter's weights: y += B (A x), with the scale in B.

With DoRA (Liu et al. 2024) a linear computes m (W + s B A) x / |W + s B A| + bias, where |.| is the
norm of each output's weights, and m has its magnitude. Both are constants: y is also multiplied by
1 + gains, which are m / |W + s B A| - 1, and the same factor is in B. Then offsets are added: what
changes biases, and what has been multiplied of a bias.

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
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.adapters.files import (
    Adapter,
    EmbeddingPair,
    Named,
    Pair,
    ReplacedRows,
    TokenRows,
    read_adapter,
)
from tgi_trio.model.adapters.rows import explain_many_rows
from tgi_trio.model.adapters.sites import (
    EVERYTHING,
    AdaptedLinear,
    AdapterScope,
    Site,
    find_input_scale,
    map_adapter,
)
from tgi_trio.model.adapters.tensor_kinds import Kind
from tgi_trio.model.checkpoint_files import StoredTensor
from tgi_trio.model.matrices.decoder import outer_refs
from tgi_trio.model.matrices.references import LinearRef, MatrixRef, Share
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.shard.adapters.base_weights import BaseWeights
from tgi_trio.shard.adapters.known_norms import KnownNorms, Rows
from tgi_trio.shard.checkpoint.numbers import Floats, to_float32

_PIECE_S: Final = 0.0005  # seconds of work after which the reader sleeps
_REST_S: Final = 0.0002
_KINDS: Final = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "F64": np.float64}


@dataclass(frozen=True, slots=True)
class AdapterPart:
    """The change of a run of a linear's outputs y, its bias included.

    It is gains * y + offsets + B (A x).
    """

    a: Floats  # [r, inputs of this rank]
    b: Floats  # [outputs, r], scaled
    start: int  # the first of these outputs among the linear's of this rank
    gains: Floats | None = None  # [outputs]; None: zeros
    offsets: Floats | None = None  # [outputs]; None: zeros


@dataclass(frozen=True, slots=True)
class EmbeddedRows:
    """Embeddings of some tokens, in place of the model's: as stored, before they are scaled."""

    tokens: NDArray[np.int64]  # [n], ascending
    rows: Floats  # [n, width]


@dataclass(frozen=True, slots=True)
class LookedUp:
    """What is added to the embedding of each token: B times its row of A, before it is scaled."""

    a: Floats  # [tokens, r]
    b: Floats  # [width, r], scaled


@dataclass(frozen=True, slots=True)
class AdapterNumbers:
    """One rank's part of an adapter."""

    sha256: bytes  # of its files
    rank: int  # the largest rank of its modules
    sites: Mapping[Site, tuple[AdapterPart, ...]]  # each is read when it is asked for
    embedded: EmbeddedRows | None = None
    looked_up: LookedUp | None = None


def read_adapter_numbers(
    folder: Path,
    spec: DecoderSpec,
    share: Share,
    base: BaseWeights,
    *,
    max_rank: int,
    expected: bytes = b"",
    adds_biases: bool = True,
    scope: AdapterScope = EVERYTHING,
    known: KnownNorms | None = None,
) -> AdapterNumbers:
    """Read a rank's `share` of an adapter.

    `base`: the weights that it changes. `expected`: the sha256 of the files as read before; b"":
    any. `adds_biases`: whether this rank adds the biases of linears whose results are partial sums.
    `scope`: what adapters may change. `known`: of this base, to be used and added to.
    Raises ModelLoadError as `read_adapter` and `map_adapter` do, and if the files have changed;
    reading its `sites` raises it for tensors with infinite values or NaN, and as `base` does.
    """
    adapter = read_adapter(folder)
    changes = map_adapter(adapter, spec, max_rank, scope)
    contents = [_read_bytes(path) for path in adapter.files]
    digest = hashlib.sha256(b"".join(hashlib.sha256(each).digest() for each in contents)).digest()
    if expected and digest != expected:
        raise ModelLoadError(
            f"the files in {folder} are not those that were loaded before: an answer cannot go on "
            "in another voice. Load them under another name"
        )
    norms = {} if known is None else known.of(digest)
    table = outer_refs(spec).embedding.pieces[0].matrix
    sites = _Sites(
        *(adapter, spec, changes.linears, contents[1], share, base, norms),
        adds_biases=adds_biases,
        most_rows=max_rank,
    )
    embedded, rank = None, changes.rank
    if (rows := changes.embedded) is not None:
        tokens, values = sites.read_rows(rows, table)
        order, rank = np.argsort(tokens), max(rank, len(tokens))
        embedded = EmbeddedRows(tokens[order], values[order]) if len(tokens) else None
    pair = changes.looked_up
    looked_up = None if pair is None else sites.read_looked_up(pair, table)
    return AdapterNumbers(digest, rank, sites, embedded, looked_up)


class _Sites(Mapping[Site, tuple[AdapterPart, ...]]):
    """A rank's part of an adapter, read module by module from its mapped file."""

    def __init__(
        self,
        adapter: Adapter,
        spec: DecoderSpec,
        mapped: Mapping[Site, AdaptedLinear],
        content: bytes,
        share: Share,
        base: BaseWeights,
        norms: dict[Rows, Floats],
        *,
        adds_biases: bool,
        most_rows: int,
    ) -> None:
        """`most_rows`: of a matrix that is saved whole, those that differ from the base's."""
        self._adapter = adapter
        self._spec = spec
        self._mapped = mapped
        self._content = content
        self._share = share
        self._base = base
        self._norms = norms
        self._adds_biases = adds_biases
        self._most_rows = most_rows
        self._rested = time.perf_counter()
        # A and B of all experts, with their module, while one expert after the other is read.
        self._of_all: tuple[str, Floats, Floats] | None = None

    def __getitem__(self, site: Site) -> tuple[AdapterPart, ...]:
        """Raises ModelLoadError, naming the tensor, for infinite values and NaN."""
        linear = self._mapped[site]
        if linear.rows is not None:
            return self._read_head_rows(linear.linear, linear.rows)
        biased = self._adds_biases or not linear.linear.partial
        modules: dict[str, _Module] = {}
        parts: list[AdapterPart] = []
        before: Pair | None = None
        start = 0
        for piece, pair in zip(linear.linear.pieces, linear.pairs, strict=True):
            spans = piece.outputs.spans(self._share(piece.outputs))
            if pair is not None:
                if pair.module not in modules:
                    factor = find_input_scale(self._spec, site)
                    modules[pair.module] = self._read_module(pair, piece.matrix, factor)
                (columns,) = piece.inputs.spans(self._share(piece.inputs))
                module = modules[pair.module]
                rows = [slice(span.start + pair.first, span.stop + pair.first) for span in spans]
                cut = [self._cut(module, each, columns, start, biased=biased) for each in rows]
                if before is not None and pair.module == before.module:
                    cut.insert(0, parts.pop())
                parts.append(_join(cut))
            before = pair
            start += sum(span.stop - span.start for span in spans)
        return tuple(parts)

    def __iter__(self) -> Iterator[Site]:
        return iter(self._mapped)

    def __len__(self) -> int:
        return len(self._mapped)

    def read_rows(self, rows: ReplacedRows, matrix: MatrixRef) -> tuple[NDArray[np.int64], Floats]:
        """Return the tokens [n] whose rows of an embedding or head are replaced, and these [n, w].

        Raises ModelLoadError for infinite values and NaN, and if too many rows of a matrix differ.
        """
        if isinstance(rows, TokenRows):
            values = _read_tensor(self._adapter, (rows.name, rows.rows), self._content)
            return np.array(rows.tokens, np.int64), values
        read, dtype = partial(_read_rows, rows.matrix, self._content), rows.matrix.dtype
        count = min(rows.matrix.shape[0], matrix.rows)
        tokens = self._base.find_changes(matrix, count, read, dtype, self._most_rows, self._rest)
        if tokens is None:
            raise ModelLoadError(explain_many_rows(self._adapter, rows, self._most_rows))
        values = np.empty((len(tokens), matrix.columns), np.float32)
        for value, token in zip(values, tokens, strict=True):
            value[:] = read(slice(token, token + 1))[0]
        self._check(rows.name, "as it is", values)
        return np.array(tokens, np.int64), values

    def read_looked_up(self, pair: EmbeddingPair, table: MatrixRef) -> LookedUp:
        """Return A and B of an embedding, whose matrix is `table`; raises ModelLoadError."""
        named = zip(pair.names, (pair.a, pair.b), strict=True)
        a, b = (_read_tensor(self._adapter, each, self._content) for each in named)
        self._check_copies(pair.copies, table)
        columns = np.zeros((table.rows, len(a)), np.float32)  # zeros: of tokens it does not have
        columns[: a.shape[1]] = a.T[: table.rows]
        return LookedUp(columns, self._scale(pair, b))

    def _read_head_rows(self, head: LinearRef, rows: ReplacedRows) -> tuple[AdapterPart, ...]:
        """Return rows of a head: A has what is added to each, and B where it belongs."""
        (piece,) = head.pieces
        tokens, a = self.read_rows(rows, piece.matrix)
        if not len(tokens):
            return ()
        for i, token in enumerate(tokens.tolist()):
            a[i] -= self._base.read_row(piece.matrix, token)
        b = np.zeros((piece.matrix.rows, len(a)), np.float32)
        b[tokens, np.arange(len(a))] = 1.0
        spans = piece.outputs.spans(self._share(piece.outputs))
        return (AdapterPart(a, np.concatenate([b[span] for span in spans]), 0),)

    def _read_module(self, pair: Pair, matrix: MatrixRef, input_scale: float) -> _Module:
        self._rest()
        a, b = self._read_matrices(pair)
        scaled = self._scale(pair, b)
        if pair.share is None and len(scaled) < matrix.rows:  # a head's, of fewer tokens
            scaled = np.pad(scaled, ((0, matrix.rows - len(scaled)), (0, 0)))
        self._check_copies(pair.copies, matrix)
        vectors = {
            kind: _read_tensor(self._adapter, named, self._content)
            for kind, named in pair.vectors.items()
        }
        if Kind.ADDED_BIAS in vectors:  # it comes before the factor of its linear's input
            vectors[Kind.ADDED_BIAS] *= np.float32(pair.scale / input_scale)
        bias = self._base.read_bias(matrix) if vectors else np.zeros(0, np.float32)
        return _Module(pair, matrix, a, scaled, bias, vectors)

    def _scale(self, pair: Pair | EmbeddingPair, b: Floats) -> Floats:
        with np.errstate(over="ignore"):
            scaled: Floats = b * np.float32(pair.scale)
        self._check(pair.names[1], f"times its scale {pair.scale:g}", scaled)
        return scaled

    def _check_copies(self, copies: Sequence[Named], matrix: MatrixRef) -> None:
        """Raise ModelLoadError unless these are copies of the model's matrix."""
        for name, tensor in copies:
            read = partial(_read_rows, tensor, self._content)
            count = min(tensor.shape[0], matrix.rows)
            if not self._base.is_copied(matrix, count, read, self._rest):
                raise ModelLoadError(
                    f"{name} of {self._adapter.folder} is not the model's own matrix: only A and B "
                    f"are served beside it. {self._adapter.config.advise()}"
                )

    def _read_matrices(self, pair: Pair) -> tuple[Floats, Floats]:
        """Return A [r, inputs] and B [outputs, r] of a module."""
        share = pair.share
        if share is None:
            named = zip(pair.names, (pair.a, pair.b), strict=True)
            a, b = (_read_tensor(self._adapter, each, self._content) for each in named)
            return a, b
        if self._of_all is None or self._of_all[0] != pair.module:
            named = zip(pair.names, (pair.a, pair.b), strict=True)
            a, b = (_read_tensor(self._adapter, each, self._content) for each in named)
            self._of_all = pair.module, a, b
        _, a, b = self._of_all
        a = a[share.index * pair.rank : (share.index + 1) * pair.rank]
        b = b[:, share.index :: share.count]
        return (b.T, a.T) if share.swapped else (a, b)

    def _cut(
        self, module: _Module, rows: slice, columns: slice, start: int, *, biased: bool
    ) -> AdapterPart:
        """Return the change of some rows of a module's matrix.

        `biased`: its bias is among what is changed.
        """
        a, b = np.ascontiguousarray(module.a[:, columns]), module.b[rows]
        vectors = module.vectors
        if not vectors:
            return AdapterPart(a, b, start)
        gains = np.zeros(len(b), np.float32)
        if Kind.MAGNITUDE in vectors:
            norms = self._measure(module, rows, b)
            with np.errstate(all="ignore"):
                gains = vectors[Kind.MAGNITUDE][rows] / norms - np.float32(1.0)
                b = b * (gains + np.float32(1.0))[:, None]
            name = module.pair.vectors[Kind.MAGNITUDE][0]
            self._check(name, "divided by the norms of what it scales", b)
        own = module.bias[rows]
        offsets = vectors[Kind.BIAS][rows] - own if Kind.BIAS in vectors else np.zeros_like(own)
        if Kind.ADDED_BIAS in vectors:
            offsets = offsets + vectors[Kind.ADDED_BIAS][rows]
        offsets = offsets - gains * own if biased else np.zeros_like(own)
        return AdapterPart(a, b, start, gains, offsets)

    def _measure(self, module: _Module, rows: slice, b: Floats) -> Floats:
        """Return the norms of some rows of a module, with B of these rows."""
        place = module.pair.module, rows.start, rows.stop
        norms = self._norms.get(place)
        if norms is None:
            norms = self._base.measure_rows(module.matrix, rows, module.a, b, self._rest)
            self._norms[place] = norms
        return norms

    def _check(self, name: str, made: str, values: Floats) -> None:
        """Raise ModelLoadError unless what was `made` of a tensor is finite."""
        if not np.isfinite(values).all():
            raise ModelLoadError(f"{name} of {self._adapter.folder} {made} is not finite")

    def _rest(self) -> None:
        if time.perf_counter() - self._rested > _PIECE_S:
            time.sleep(_REST_S)
            self._rested = time.perf_counter()


@dataclass(frozen=True, slots=True)
class _Module:
    """What an adapter has for a module, whole."""

    pair: Pair
    matrix: MatrixRef
    a: Floats
    b: Floats  # scaled
    bias: Floats  # the base's, if there are `vectors`
    vectors: Mapping[Kind, Floats]  # B's bias scaled


def _join(parts: list[AdapterPart]) -> AdapterPart:
    """Return adjacent parts of one pair as one."""
    first = parts[0]
    if len(parts) == 1:
        return first
    joined: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in ("b", "gains", "offsets")
        if getattr(first, name) is not None
    }
    return replace(first, **joined)


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error


def _read_rows(tensor: StoredTensor, content: bytes, rows: slice) -> Floats:
    """Return some rows of a matrix."""
    kind, width = np.dtype(_KINDS[tensor.dtype]), tensor.shape[1]
    first = tensor.first + rows.start * width * kind.itemsize
    count = (rows.stop - rows.start) * width
    return to_float32(np.frombuffer(content, kind, count, first)).reshape(-1, width)


def _read_tensor(adapter: Adapter, named: Named, content: bytes) -> Floats:
    name, tensor = named
    kind, count = np.dtype(_KINDS[tensor.dtype]), math.prod(tensor.shape)
    if tensor.first + count * kind.itemsize > len(content):
        raise ModelLoadError(f"{tensor.file} has changed while it was read: {name} is cut off")
    raw = np.frombuffer(content, kind, count, tensor.first)
    values = to_float32(raw).reshape(tensor.shape).copy()  # else a view of what is read alone
    if not np.isfinite(values).all():
        raise ModelLoadError(f"{name} of {adapter.folder} holds numbers that are infinite or none")
    return values
