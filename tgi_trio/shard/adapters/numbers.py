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
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

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
from tgi_trio.model.adapters.tensor_kinds import TensorKind
from tgi_trio.model.matrices.decoder import outer_refs
from tgi_trio.model.matrices.references import MatrixRef, Share
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.shard.adapters.base_weights import BaseWeights
from tgi_trio.shard.adapters.known_norms import KnownNorms, Rows
from tgi_trio.shard.adapters.parts import AdapterPart, EmbeddedRows, LookedUp, join_parts
from tgi_trio.shard.adapters.tensor_numbers import read_bytes, read_rows, read_tensor
from tgi_trio.shard.checkpoint.numbers import Floats

_PIECE_S: Final = 0.0005  # seconds of work after which the reader sleeps
_REST_S: Final = 0.0002


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
    contents = [read_bytes(path) for path in adapter.files]
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
            return self._read_head(linear, linear.rows)
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
                parts.append(join_parts(cut))
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
            values = read_tensor(self._adapter, (rows.name, rows.rows), self._content)
            return np.array(rows.tokens, np.int64), values
        read, dtype = partial(read_rows, rows.matrix, self._content), rows.matrix.dtype
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
        """Return what an adapter has for an embedding, whose matrix is `table`.

        Raises ModelLoadError.
        """
        named = zip(pair.names, (pair.a, pair.b), strict=True)
        a, b = (read_tensor(self._adapter, each, self._content) for each in named)
        self._check_copies(pair.copies, table)
        columns = np.zeros((table.rows, len(a)), np.float32)  # zeros: of tokens it does not have
        columns[: a.shape[1]] = a.T[: table.rows]
        b = self._scale(pair, b)
        if pair.magnitude is None:
            return LookedUp(columns, b)
        place = pair.module, 0, table.rows
        if place not in self._norms:
            self._norms[place] = self._base.measure_columns(table, columns, b, self._rest)
        magnitudes = read_tensor(self._adapter, pair.magnitude, self._content)
        with np.errstate(all="ignore"):
            factors = magnitudes / self._norms[place]
        self._check(pair.magnitude[0], "divided by the norms of what it scales", factors)
        return LookedUp(columns, b * factors[:, None], factors - np.float32(1.0))

    def _read_head(self, linear: AdaptedLinear, rows: ReplacedRows) -> tuple[AdapterPart, ...]:
        """Return what is changed of a head of which some rows are replaced.

        For these A has what is added to each, and B where it belongs; those of a pair stand before.
        """
        ((piece,), (pair,)) = linear.linear.pieces, linear.pairs
        matrix = piece.matrix
        tokens, a = self.read_rows(rows, matrix)
        for i, token in enumerate(tokens.tolist()):
            a[i] -= self._base.read_row(matrix, token)
        b = np.zeros((matrix.rows, len(a)), np.float32)
        b[tokens, np.arange(len(a))] = 1.0
        if pair is not None:
            module = self._read_module(pair, matrix, 1.0)
            a, b = np.concatenate((module.a, a)), np.concatenate((module.b, b), axis=1)
        offsets = self._read_new_bias(rows, matrix) if linear.replaces_bias else None
        if not len(a) and offsets is None:
            return ()
        if not len(a):
            a, b = np.zeros((1, matrix.columns), np.float32), np.zeros_like(b, shape=(len(b), 1))
        spans = piece.outputs.spans(self._share(piece.outputs))
        b = np.concatenate([b[span] for span in spans])
        if offsets is None:
            return (AdapterPart(a, b, 0),)
        offsets = np.concatenate([offsets[span] for span in spans])
        return (AdapterPart(a, b, 0, np.zeros_like(offsets), offsets),)

    def _read_new_bias(self, rows: ReplacedRows, head: MatrixRef) -> Floats:
        """Return what is added to the bias of a head some of whose rows are replaced."""
        own = self._base.read_bias(head)
        if isinstance(rows, TokenRows) or rows.bias is None:
            return -own
        return read_tensor(self._adapter, rows.bias, self._content) - own

    def _read_module(self, pair: Pair, matrix: MatrixRef, input_scale: float) -> _Module:
        self._rest()
        a, b = self._read_matrices(pair)
        scaled = self._scale(pair, b)
        if pair.share is None and len(scaled) < matrix.rows:  # a head's, of fewer tokens
            scaled = np.pad(scaled, ((0, matrix.rows - len(scaled)), (0, 0)))
        self._check_copies(pair.copies, matrix)
        vectors = {
            kind: read_tensor(self._adapter, named, self._content)
            for kind, named in pair.vectors.items()
        }
        if TensorKind.ADDED_BIAS in vectors:  # it comes before the factor of its linear's input
            vectors[TensorKind.ADDED_BIAS] *= np.float32(pair.scale / input_scale)
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
            read = partial(read_rows, tensor, self._content)
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
            a, b = (read_tensor(self._adapter, each, self._content) for each in named)
            return a, b
        if self._of_all is None or self._of_all[0] != pair.module:
            named = zip(pair.names, (pair.a, pair.b), strict=True)
            a, b = (read_tensor(self._adapter, each, self._content) for each in named)
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
        if TensorKind.MAGNITUDE in vectors:
            norms = self._measure(module, rows, b)
            with np.errstate(all="ignore"):
                gains = vectors[TensorKind.MAGNITUDE][rows] / norms - np.float32(1.0)
                b = b * (gains + np.float32(1.0))[:, None]
            name = module.pair.vectors[TensorKind.MAGNITUDE][0]
            self._check(name, "divided by the norms of what it scales", b)
        own = module.bias[rows]
        offsets = (
            vectors[TensorKind.BIAS][rows] - own
            if TensorKind.BIAS in vectors
            else np.zeros_like(own)
        )
        if TensorKind.ADDED_BIAS in vectors:
            offsets = offsets + vectors[TensorKind.ADDED_BIAS][rows]
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
    vectors: Mapping[TensorKind, Floats]  # B's bias scaled
