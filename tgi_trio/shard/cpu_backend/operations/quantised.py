"""Operations on weights as stored: the fields that depend on the compiled kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.cpu_backend.kinds.kind import BLOCK_INPUTS, Kind
from tgi_trio.shard.cpu_backend.kinds.packing import Packing
from tgi_trio.shard.cpu_backend.tables import Buffer, Form

if TYPE_CHECKING:
    from tgi_trio.shard.cpu_backend.multiplier import Multiplier
    from tgi_trio.shard.cpu_backend.panel_kernel import PanelKernel

_FORMS = {
    8: (Form.WHOLE_8, Buffer.WHOLE_8),
    16: (Form.WHOLE_16, Buffer.WHOLE_16),
}
_DIGITS = {8: (Form.DIGITS_8, Buffer.DIGITS), 16: (Form.DIGITS_16, Buffer.DIGITS)}
_FLOATING_FORMS = {16: (Form.PAIRS, Buffer.FLOATS), 32: (Form.FLOATS, Buffer.FLOATS)}


@dataclass(frozen=True, slots=True)
class _Use:
    """A row of the table of operations that reads packed codes."""

    row: int
    packing: Packing
    feeder: int | None  # the row that writes its activations; None: it has none


class QuantisedOperations:
    """The operations that multiply or look up quantised weights."""

    def __init__(self) -> None:
        self._uses: list[_Use] = []
        self._active: dict[str, str] = {}  # what activations are, by the names of kinds

    def kinds(self, before: int | None = None) -> list[Kind]:
        """Return the kinds of their weights, each once; of the rows before `before`, or of all."""
        uses = (use for use in self._uses if before is None or use.row < before)
        return list(dict.fromkeys(use.packing.kind for use in uses))

    def describe(self, before: int) -> list[str]:
        """Return the names of `kinds`, with the type of activations if they have been linked."""
        names = [kind.name for kind in self.kinds(before)]
        found = self._active
        return [f"{name} x {found[name]}" if name in found else name for name in names]

    def add(self, row: int, packing: Packing, feeder: int | None = None) -> None:
        self._uses.append(_Use(row, packing, feeder))

    def link(self, operations: NDArray[np.void], kernels: Mapping[str, PanelKernel]) -> int:
        """Link `kernels`, by the names of kinds; return the scratch bytes that a thread needs."""
        room = 0
        self._active = {name: _describe(kernel.multiplier) for name, kernel in kernels.items()}
        for use in self._uses:
            kernel, operation = kernels[use.packing.kind.name], operations[use.row]
            inputs = int(operation["inputs"])
            for name, value in _fields(kernel, use.packing, inputs).items():
                operation[name] = value
            if use.feeder is not None:
                form, buffer = _forms(use.packing.kind)[kernel.multiplier.active_bits]
                operation["source"] = buffer
                operations[use.feeder]["forms"] |= form
            room = max(room, kernel.room_bytes(inputs))
        return room


def _forms(kind: Kind) -> Mapping[int, tuple[Form, Buffer]]:
    """Return the forms of activations that a kind is multiplied with, by their bits."""
    if kind.floating:
        return _FLOATING_FORMS
    return _DIGITS if kind.by_rows else _FORMS


def _describe(multiplier: Multiplier) -> str:
    """Return the type of activations that a kernel multiplies."""
    if multiplier.kind.floating:
        return "bfloat16" if multiplier.active_bits == 16 else "float32"
    return f"int{multiplier.active_bits}"


def _fields(kernel: PanelKernel, packing: Packing, inputs: int) -> dict[str, Any]:
    kind, unpacked = packing.kind, kernel.multiplier.unpacked.kind
    return {
        "multiply": kernel.code.address,
        "active_bytes": kernel.multiplier.active_bytes,
        "facts_bytes": kernel.multiplier.facts_bytes,
        "panel_bytes": kind.panel_bytes(inputs, packing.span),
        "span_blocks": packing.span // BLOCK_INPUTS,
        "room_bytes": unpacked.block_bytes,
        "parts": unpacked.parts,
        "lows": unpacked.low_parts,
        "zero": unpacked.zero,
    }
