"""The operation that applies gates to the output of attention or of a recurrent state."""

from __future__ import annotations

from typing import Any

import numpy as np

from tgi_trio.shard.cpu_backend.operations.writer import OperationWriter
from tgi_trio.shard.cpu_backend.tables import OPENING, Buffer, Code, GroupNorm


def add_gates(
    writer: OperationWriter, source: Buffer, *, inputs: int, width: int, **fields: Any
) -> None:
    """Add OPEN; `fields`: those of OPENING, and `offset`, `weights` and `eps` of the operation."""
    facts = np.zeros((1,), OPENING)
    names = OPENING.names or ()
    for name in fields.keys() & set(names):
        facts[name] = fields.pop(name)
    writer.add(
        Code.OPEN,
        source=source,
        target=Buffer.MIXED,
        inputs=inputs,
        width=width,
        facts=writer.keep(facts),
        **fields,
    )


def gate_second_half(writer: OperationWriter, inputs: int, width: int, activation: int) -> None:
    """Add OPEN for PROJECTED, whose first `width` numbers open the `width` behind them.

    `inputs`: all numbers of a row.
    """
    add_gates(
        writer,
        Buffer.PROJECTED,
        inputs=inputs,
        width=width,
        offset=width,
        gates=Buffer.PROJECTED,
        gate_width=inputs,
        gate_size=1,
        group=width,
        norm=GroupNorm.NONE,
        activation=activation,
    )
