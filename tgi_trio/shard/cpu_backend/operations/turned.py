"""The operations of a linear layer whose matrices are EXL3's: a turn, the product, another turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.checkpoint.stored_matrix import StoredMatrix
from tgi_trio.shard.cpu_backend.kinds.packing import Packing
from tgi_trio.shard.cpu_backend.operations.quantised import QuantisedOperations
from tgi_trio.shard.cpu_backend.packing import interleave
from tgi_trio.shard.cpu_backend.tables import Buffer, Code, Epilogue

Rows: TypeAlias = Literal["tokens", "wanted", "lone"]  # that a linear multiplies
# What a linear in the middle of others may ask for, and these do not have: a part of its source.
PARTIAL: Final = frozenset({"begin", "span"})


class Writer(Protocol):
    """What is used of an `OperationWriter`."""

    rows: list[NDArray[np.void]]
    quantised: QuantisedOperations

    def add(self, code: Code, **fields: Any) -> None: ...

    def keep(self, array: NDArray[Any] | None) -> int: ...

    def pack_codes(self, parts: Sequence[StoredMatrix], packing: Packing) -> int: ...

    def widen(self, inputs: int, outputs: int, rows: Rows) -> None: ...


def add_turned(
    writer: Writer, part: StoredMatrix, packing: Packing, source: Buffer, **fields: Any
) -> None:
    """Add one matrix; `source`: float32 rows. `fields`: of a linear, with its target and offset."""
    _multiply(writer, part, packing, source, fields["wanted_only"])
    writer.add(
        Code.TURN_OUT,
        source=Buffer.RAW,
        outputs=part.shape[0],
        scales=writer.keep(_output_scales(part)),
        **fields,
    )


def add_turned_gate(
    writer: Writer,
    gate: tuple[StoredMatrix, Packing],
    up: tuple[StoredMatrix, Packing],
    source: Buffer,
    **fields: Any,
) -> None:
    """Add the gate and the up of a gated unit, whose epilogue follows the turn of the up."""
    wanted_only, outputs = fields["wanted_only"], gate[0].shape[0]
    _multiply(writer, *gate, source, wanted_only)
    writer.add(
        Code.TURN_OUT,
        source=Buffer.RAW,
        target=Buffer.GATES,
        outputs=outputs,
        width=outputs,
        epilogue=Epilogue.STORE,
        scale=1.0,
        wanted_only=wanted_only,
    )
    _multiply(writer, *up, source, wanted_only)
    scales = interleave(_output_scales(gate[0]), _output_scales(up[0]))
    writer.add(
        Code.TURN_OUT, source=Buffer.RAW, outputs=outputs, scales=writer.keep(scales), **fields
    )


def _multiply(
    writer: Writer, part: StoredMatrix, packing: Packing, source: Buffer, wanted_only: int
) -> None:
    """Add the product, whose result is in RAW."""
    outputs, inputs = part.shape
    rows: Rows = "wanted" if wanted_only else "lone" if source == Buffer.LONE else "tokens"
    writer.widen(inputs, outputs, rows)
    scales = part.rows(slice(0, 0)).planes()["input scales"]
    writer.add(
        Code.TURN_IN,
        source=source,
        inputs=inputs,
        width=inputs,
        scales=writer.keep(scales),
        wanted_only=wanted_only,
    )
    writer.quantised.add(len(writer.rows), packing, len(writer.rows) - 1)
    writer.add(
        Code.LINEAR,
        target=Buffer.RAW,
        inputs=inputs,
        outputs=outputs,
        width=outputs,
        epilogue=Epilogue.STORE,
        scale=1.0,
        weights=writer.pack_codes([part], packing),
        wanted_only=wanted_only,
    )


def _output_scales(part: StoredMatrix) -> NDArray[np.float32]:
    return np.asarray(part.columns(slice(0, 0)).planes()["output scales"])
