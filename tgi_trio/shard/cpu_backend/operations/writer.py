"""Writes rows of the table of operations, and packs the weights to which they point."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.model.matrices.references import LinearRef
from tgi_trio.model.split import Portion
from tgi_trio.shard.checkpoint.formats.int8 import Int8Matrix
from tgi_trio.shard.checkpoint.formats.plain import PlainMatrix
from tgi_trio.shard.checkpoint.lookup import Weights, read_bias, read_linear, read_table
from tgi_trio.shard.checkpoint.numbers import Floats, to_bfloat16, to_float32
from tgi_trio.shard.checkpoint.stored_matrix import Stack, StoredMatrix
from tgi_trio.shard.cpu_backend.arena import address
from tgi_trio.shard.cpu_backend.kinds.packing import Packing
from tgi_trio.shard.cpu_backend.kinds.table import find_packing
from tgi_trio.shard.cpu_backend.operations.quantised import QuantisedOperations
from tgi_trio.shard.cpu_backend.operations.turned import (
    PARTIAL,
    Rows,
    add_turned,
    add_turned_gate,
)
from tgi_trio.shard.cpu_backend.packing import Packer, interleave
from tgi_trio.shard.cpu_backend.tables import OPERATION, Buffer, Code, Epilogue, Form
from tgi_trio.shard.cpu_backend.weight_layout import PANEL

Array = NDArray[Any]

_ROWS_AT_ONCE = 128 * PANEL  # rows of a matrix that are converted to float32 at once
_TERMS = 3  # matrices of 8 bits whose sum is one that is not rounded
_SHORTEST = 1e-12  # the least length of a row, as in torch
# Operations that write float32 to a buffer of its own.
_LEAVE_UNSORTED = (
    *(Code.NORM, Code.PASS_ON, Code.COMPRESS, Code.GATE_NORM),
    *(Code.SETTLE, Code.MIX, Code.PICK, Code.LOOK_UP),
)
_FEEDERS = (*_LEAVE_UNSORTED, Code.QUANTISE)  # operations whose results can have any form


class OperationWriter:
    """Writes operations one after the other; keeps alive what they point to.

    `source`: where `linear` finds weights. `feeder`: the row that writes the input of the next
    linear layer. `sums`: (row, buffer) for partial sums, which all ranks add up before that row.
    """

    def __init__(
        self,
        source: Weights,
        packer: Packer,
        *,
        as_stored: bool,
        turns: bool,
        int8_by_rows: bool,
        portion: Portion,
    ) -> None:
        """Hand weights to `packer`; `as_stored`: quantised weights are multiplied as stored if
        there is a kernel for their kind, EXL3's with `turns`. `int8_by_rows`: as for
        `find_packing`. `portion`: of every linear layer.
        """
        self.portion = portion
        self.sums: list[tuple[int, Buffer]] = []
        self.source = source
        self.rows: list[NDArray[np.void]] = []
        self.quantised = QuantisedOperations()
        self.dequantised = set[str]()  # codings of matrices that were dequantised
        self.weight_bytes = 0
        self.widest = 0  # inputs of linears whose inputs are reordered or turned
        self._widest_raw: dict[Rows, int] = {}  # outputs of linears whose results are turned
        self.feeder = 0
        self._packer = packer
        self._as_stored = as_stored
        self._turns = turns
        self._int8_by_rows = int8_by_rows
        self._packed: dict[Any, int] = {}  # addresses of packed codes, by their places in files
        # Those of numbers and their scales that layers share, by the names of the matrices.
        self._numbers: dict[Any, tuple[int, int]] = {}
        self._kept: list[Array] = []  # keeps arrays alive, since operations hold only addresses

    def linear(
        self,
        linear: LinearRef,
        source: Buffer,
        target: Buffer,
        *,
        paired: bool = False,
        feeder: int | None = None,
        place: int = 0,
        normalised: bool = False,
        reused: bool = False,
        unrounded: bool = False,
        **fields: Any,
    ) -> None:
        """Add a linear layer; `paired`: the gate and up of a gated unit, computed together.

        `feeder`: the row that writes its activations; None: the previous one. `place`: the offset
        of its first feature in a target row. `normalised`: rows of the matrix are divided by their
        lengths. `reused`: other layers have the same matrix, which is packed once. `unrounded`: it
        is not rounded while it is loaded. Raises ModelLoadError as the weights do.
        """
        portion = self.portion
        read = read_table if unrounded else read_linear
        weights = read(self.source, linear, portion.share)
        if normalised:
            weights = normalise_rows(weights)
        bias = None
        if not (linear.partial and portion.rank):  # only one rank adds it
            bias = read_bias(self.source, linear, portion.share)
        summed = linear.partial and portion.ranks > 1
        if summed and portion.rank and fields.get("epilogue") == Epilogue.ADD:
            fields["epilogue"] = Epilogue.STORE  # rank 0 adds the residual stream
        self.feeder = len(self.rows) - 1 if feeder is None else feeder
        names = tuple(piece.matrix.name for piece in linear.pieces) if reused else ()
        if unrounded and self._packer.rounds:
            self._sum_of_rounded(weights, bias, source, target, **fields)
            return
        self.product(
            weights, bias, source, target, paired=paired, place=place, reused=names, **fields
        )
        if summed:
            self.sums.append((len(self.rows), target))

    def _sum_of_rounded(
        self, weights: Stack, bias: Floats | None, source: Buffer, target: Buffer, **fields: Any
    ) -> None:
        """Add a linear layer whose numbers are kept, where all panels have 8 bits.

        It is the sum of three of 8 bits, each of what those before it have rounded away: 23 bits of
        the largest number of a row are kept, as many as float32 has.
        """
        feeder, cap = self.feeder, fields.pop("cap", 0.0)
        left: Floats = np.concatenate([to_float32(each.dequantised()) for each in weights.parts])
        for term in range(_TERMS):
            self.feeder = feeder
            rounded = Int8Matrix(PlainMatrix(left))
            own = {"epilogue": Epilogue.ADD} if term else {}
            if term == _TERMS - 1:
                own["cap"] = cap  # of the sum
            self.product(Stack([rounded.exact]), bias, source, target, **(fields | own))
            bias, left = None, left - rounded.dequantised()

    def product(
        self,
        weights: Stack,
        bias: Floats | None,
        source: Buffer,
        target: Buffer,
        *,
        paired: bool = False,
        place: int = 0,
        reused: tuple[str, ...] = (),
        **fields: Any,
    ) -> None:
        """Add a linear layer of matrices that have been read; row `self.feeder` writes its input.

        `bias`: [outputs]. `reused`: names of the matrices, if others have the same; the rest as for
        `linear`.
        """
        if not paired:
            weights = fill_panels(weights)
        outputs = sum(-(-part.shape[0] // PANEL) * PANEL for part in weights.parts)
        if bias is not None:
            bias = interleave(*np.split(bias, 2)) if paired else bias
            bias = np.pad(bias, (0, outputs - len(bias)))
        defaults = {"epilogue": Epilogue.STORE, "scale": 1.0, "width": outputs} | fields
        offset, partial = 0, bool(PARTIAL & fields.keys())
        runs = list(self._runs(weights.parts, paired, partial=partial))
        wanted_only = int(fields.get("wanted_only", 0))
        if any(packing is not None and packing.order for packing, _ in runs):
            self._leave_unsorted(source, weights.shape[1], wanted_only)
        for packing, parts in runs:
            count = sum(-(-part.shape[0] // PANEL) * PANEL for part in parts)
            own = {} if bias is None else {"bias": self.keep(bias[offset : offset + count])}
            if packing is not None and packing.kind.turned:
                facts = {"target": target, "offset": place + offset, "wanted_only": wanted_only}
                self._turn(parts, source, paired=paired, **(defaults | facts | own))
                offset += count
                continue
            if packing is None:
                key = (*reused, offset) if reused else None
                panels, scales = self._numbers.get(key) or self.pack_numbers(parts, paired=paired)
                if key is not None:
                    self._numbers[key] = panels, scales
                own |= {"weights": panels, "scales": scales}
            else:
                own["weights"] = self.pack_codes(parts, packing, paired=paired)
            inputs = weights.shape[1]
            self.feed(source, inputs, packing, wanted_only)
            self.add(
                Code.LINEAR,
                source=source,
                target=target,
                inputs=packing.count_inputs(inputs) if packing else inputs,
                outputs=count,
                offset=place + offset,
                **own,
                **defaults,
            )
            offset += count

    def _turn(
        self, parts: Sequence[StoredMatrix], source: Buffer, *, paired: bool, **fields: Any
    ) -> None:
        """Add matrices of EXL3's, of which each is turned in its own way."""
        found = [(part, packing) for part in parts if (packing := self.find(part)) is not None]
        feeder = self.rows[self.feeder]
        feeder["forms"] |= Form.WIDE
        if feeder["code"] in _LEAVE_UNSORTED:
            source = Buffer.UNSORTED
        if paired:
            add_turned_gate(self, found[0], found[1], source, **fields)
            return
        bias = fields.pop("bias", 0)
        for part, packing in found:
            own = {"bias": bias} if bias else {}
            add_turned(self, part, packing, source, **own, **fields)
            fields["offset"] += part.shape[0]
            bias = bias + 4 * part.shape[0] if bias else 0

    def widen(self, inputs: int, outputs: int, rows: Rows) -> None:
        """Make room for activations and results that are turned."""
        self.widest = max(self.widest, inputs)
        self._widest_raw[rows] = max(self._widest_raw.get(rows, 0), outputs)

    def describe(self, end: int) -> str:
        """Describe for an operator how quantised weights of rows before `end` are used."""
        kept = ", ".join(self.quantised.describe(end))
        lost = ", ".join(sorted(self.dequantised))
        words = [f"weights as they are stored ({kept})" if kept else ""]
        words.append(f"dequantised ones ({lost})" if lost else "")
        return ", ".join(filter(None, words))

    def count_raw(self, tokens: int, wanted: int, lone: int) -> int:
        """Return the room for results that have yet to be turned, in numbers, for rows of each."""
        counts: dict[Rows, int] = {"tokens": tokens, "wanted": wanted, "lone": lone}
        return max((counts[rows] * width for rows, width in self._widest_raw.items()), default=0)

    def _leave_unsorted(self, source: Buffer, inputs: int, wanted_only: int) -> None:
        """Have activations written as float32, which each run of reordered matrices quantises."""
        self.rows[self.feeder]["forms"] |= Form.WIDE
        if self.rows[self.feeder]["code"] in _LEAVE_UNSORTED:
            return
        # Adapters find the activations here, in the model's order.
        self.add(Code.QUANTISE, source=source, inputs=inputs, width=inputs, wanted_only=wanted_only)

    def feed(
        self,
        source: Buffer,
        inputs: int,
        packing: Packing | None,
        wanted_only: int,
        *,
        rows_per_token: int = 1,
    ) -> None:
        """Have activations written in a form that the next operation multiplies.

        `inputs`: of a token, all of its rows together.
        """
        feeder = self.rows[self.feeder]
        if packing is None:
            feeder["forms"] |= Form.PLAIN
            return
        apart = packing.kind.by_rows or feeder["code"] not in _FEEDERS
        if apart or feeder["forms"] & Form.WIDE:
            feeder["forms"] |= Form.WIDE
            if feeder["code"] in _LEAVE_UNSORTED:
                source = Buffer.UNSORTED
            order = self.keep(packing.sources) if packing.order else 0
            count = packing.count_inputs(inputs)
            self.widest = max(self.widest, count)
            self.add(
                Code.QUANTISE,
                source=source,
                inputs=count,
                width=inputs // rows_per_token,
                order=order,
                wanted_only=wanted_only,
            )
            self.quantised.add(len(self.rows), packing, len(self.rows) - 1)
            return
        self.quantised.add(len(self.rows), packing, self.feeder)

    def pack_numbers(
        self, parts: Sequence[StoredMatrix], *, paired: bool = False
    ) -> tuple[int, int]:
        """Pack matrices as floating-point numbers, or as int8; return the addresses of panels and
        scales, 0 without scales.
        """
        self.dequantised |= {part.coding for part in parts} - {"numbers"}
        panels, scales = self._packer.pack(Stack(parts), paired=paired)
        return self.keep(panels), self.keep(scales)

    def pack_codes(
        self, parts: Sequence[StoredMatrix], packing: Packing, *, paired: bool = False
    ) -> int:
        """Pack matrices as stored; return their address. The same matrices are packed once: an
        embedding and a head may share them.
        """
        key = tuple((*part.place(), part.shape, part.coding) for part in parts)
        if key not in self._packed:
            panels = self._packer.pack_codes(parts, packing, paired=paired)
            self._packed[key] = self.keep(panels)
        return self._packed[key]

    def packing(self, parts: Sequence[StoredMatrix]) -> Packing | None:
        """Return how all these matrices can be packed as stored; None: not all alike."""
        found = {self.find(part) for part in parts}
        return found.pop() if len(found) == 1 else None

    def find(self, part: StoredMatrix) -> Packing | None:
        """Return how a matrix can be packed as stored, or None."""
        if not self._as_stored:
            return None
        found = find_packing(part, int8_by_rows=self._int8_by_rows)
        return None if found is not None and found.kind.turned and not self._turns else found

    def _runs(
        self, parts: Sequence[StoredMatrix], together: bool, *, partial: bool
    ) -> Iterator[tuple[Packing | None, Sequence[StoredMatrix]]]:
        """Yield runs of matrices that are packed alike; `together`: all in one run; `partial`: of
        a part of a source's rows, which is not turned.
        """
        found = [self.find(part) for part in parts]
        turned = all(packing is not None and packing.kind.turned for packing in found)
        if turned and partial:
            yield None, parts
            return
        if together and turned:
            yield found[0], parts  # which may differ, since each is a product of its own
            return
        if together or not self._as_stored:
            yield self.packing(parts), parts
            return
        for packing, run in itertools.groupby(parts, self.find):
            yield packing, list(run)

    def keep(self, array: Array | None) -> int:
        """Keep an array alive; return its address, 0 for none."""
        if array is None:
            return 0
        array = np.ascontiguousarray(array)
        self._kept.append(array)
        self.weight_bytes += array.nbytes
        return address(array)

    def add(self, code: Code, **fields: Any) -> None:
        row = np.zeros((), OPERATION)
        row["code"] = code
        for name, value in fields.items():
            row[name] = value
        self.rows.append(row)


def normalise_rows(weights: Stack) -> Stack:
    """Return matrices with rows of length one, dequantised; some rows at a time."""
    parts = []
    for part in weights.parts:
        for first in range(0, part.shape[0], _ROWS_AT_ONCE):
            rows = part.rows(slice(first, first + _ROWS_AT_ONCE)).dequantised()
            values = to_float32(rows)
            lengths = np.linalg.norm(values, axis=1, keepdims=True)
            values = values / np.maximum(lengths, _SHORTEST)
            parts.append(PlainMatrix(to_bfloat16(values) if rows.dtype == np.uint16 else values))
    return Stack(parts)


def fill_panels(weights: Stack) -> Stack:
    """Return matrices such that all but the last are whole panels.

    From the first that is not, all are dequantised into one: a feature of a result has the offset
    that it has among the outputs.
    """
    parts = list(weights.parts)
    odd = next((i for i, part in enumerate(parts) if part.shape[0] % PANEL), len(parts))
    if odd + 1 >= len(parts):
        return weights
    rest = np.concatenate([to_float32(part.dequantised()) for part in parts[odd:]])
    return Stack([*parts[:odd], PlainMatrix(rest)])
