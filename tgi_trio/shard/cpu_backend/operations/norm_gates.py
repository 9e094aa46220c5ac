"""The operations of a gate of low rank behind a norm, which its own result opens (A.X-K2)."""

from __future__ import annotations

import numpy as np

from tgi_trio.model.matrices.references import every_unit
from tgi_trio.model.matrices.roles import NormGateRefs
from tgi_trio.shard.checkpoint.formats.plain import PlainMatrix
from tgi_trio.shard.checkpoint.lookup import read_linear
from tgi_trio.shard.checkpoint.numbers import to_float32
from tgi_trio.shard.checkpoint.stored_matrix import Stack
from tgi_trio.shard.cpu_backend.operations.mixtures import pad_to_panel
from tgi_trio.shard.cpu_backend.operations.writer import OperationWriter
from tgi_trio.shard.cpu_backend.tables import Activation, Buffer, Code, Epilogue, Form


def add_norm_gate(writer: OperationWriter, refs: NormGateRefs, hidden: int) -> None:
    """Add x * sigmoid(up(silu(down(x)))) for x [T, hidden] of the norm that was added last.

    The result is in its place, for products. `up` is dequantised. Raises ModelLoadError as the
    weights do.
    """
    norm = len(writer.rows) - 1
    writer.linear(
        refs.down,
        Buffer.NORMED,
        Buffer.MIXED,
        epilogue=Epilogue.ACTIVATE,
        activation=Activation.SILU,
    )
    # Its inputs are the padded outputs of the other, whose padding is 0.
    parts = read_linear(writer.source, refs.up, every_unit).parts
    writer.dequantised |= {part.coding for part in parts} - {"numbers"}
    up = np.concatenate([to_float32(part.dequantised()) for part in parts])
    up = np.pad(up, ((0, 0), (0, pad_to_panel(up.shape[1]) - up.shape[1])))
    writer.feeder = len(writer.rows) - 1
    writer.product(Stack([PlainMatrix(up)]), None, Buffer.MIXED, Buffer.BRANCH)
    writer.rows[norm]["forms"] |= Form.WIDE
    writer.add(
        Code.GATE_NORM, source=Buffer.BRANCH, target=Buffer.NORMED, inputs=hidden, width=hidden
    )
