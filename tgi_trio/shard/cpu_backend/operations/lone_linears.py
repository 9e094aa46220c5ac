"""Single linear layers outside a step: those of speculation heads, and the model's own head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tgi_trio.model.matrices.references import LinearRef, every_unit
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.model.speculators.spec import HeadsSpec
from tgi_trio.shard.checkpoint.lookup import Weights, read_linear
from tgi_trio.shard.cpu_backend.operations.writer import OperationWriter
from tgi_trio.shard.cpu_backend.tables import Buffer, Code
from tgi_trio.shard.speculation.arithmetic import MODEL_HEAD

LONE_ROWS: Final = 16  # rows that are computed at once: enough for a step's drafts


@dataclass(frozen=True, slots=True)
class LoneLinear:
    """The operations of one linear layer whose input rows come from outside."""

    first: int  # in the table
    end: int
    inputs: int
    outputs: int
    width: int  # features of a row of the result, in whole panels
    wide: bool  # the input is float32, which the first operation quantises


def add_lone_linears(
    writer: OperationWriter,
    spec: DecoderSpec,
    head: LinearRef,
    heads: HeadsSpec,
    weights: Weights,
) -> dict[str, LoneLinear]:
    """Add the linear layers of heads, and the model's head again, for the heads' rows.

    The model's head must have been added last. `weights`: of the heads. Returns them by role.
    """
    first = len(writer.rows)
    parts = read_linear(writer.source, head, every_unit).parts
    if spec.normalised_head or writer.packing(parts) is None:
        row = writer.rows[-1].copy()  # the same weights
        row["source"], row["target"], row["wanted_only"] = Buffer.LONE, Buffer.PRODUCT, 0
        writer.rows.append(row)
    else:
        writer.linear(head, Buffer.LONE, Buffer.PRODUCT)
    lone = {MODEL_HEAD: _describe(writer, first, spec.vocab_size)}
    model, writer.source = writer.source, weights
    for role, ref in heads.linears.items():
        first = len(writer.rows)
        writer.linear(ref, Buffer.LONE, Buffer.PRODUCT)
        lone[role] = _describe(writer, first, sum(p.matrix.rows for p in ref.pieces))
    writer.source = model
    return lone


def _describe(writer: OperationWriter, first: int, outputs: int) -> LoneLinear:
    """Describe the linear layer whose operations begin at `first`."""
    rows = writer.rows[first:]
    wide = bool(rows[0]["code"] in (Code.QUANTISE, Code.TURN_IN))
    return LoneLinear(
        first=first,
        end=len(writer.rows),
        inputs=int(rows[0]["width" if wide else "inputs"]),
        outputs=outputs,
        width=int(rows[-1]["width"]),
        wide=wide,
    )
