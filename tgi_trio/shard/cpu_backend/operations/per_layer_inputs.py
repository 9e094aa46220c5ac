"""The operations of per-layer embeddings of a token: before the first layer, and after each."""

from __future__ import annotations

import numpy as np

from tgi_trio.model.matrices.references import every_unit
from tgi_trio.model.matrices.roles import PerLayerInputRefs, PerLayerInputsRefs
from tgi_trio.model.specs.decoder import DecoderSpec, PerLayerInputsSpec
from tgi_trio.shard.checkpoint.lookup import read_table
from tgi_trio.shard.checkpoint.numbers import to_bfloat16, to_float32
from tgi_trio.shard.cpu_backend.operations.gates import add_gates
from tgi_trio.shard.cpu_backend.operations.writer import OperationWriter
from tgi_trio.shard.cpu_backend.packing import to_storage
from tgi_trio.shard.cpu_backend.tables import ACTIVATIONS, OWN, Buffer, Code, GroupNorm


def own_width(spec: DecoderSpec) -> int:
    """Return the features of a row of OWN, over all layers; 0: no per-layer embeddings."""
    return len(spec.layers) * spec.per_layer_inputs.width if spec.per_layer_inputs else 0


def add_per_layer_inputs(
    writer: OperationWriter,
    refs: PerLayerInputsRefs,
    own: PerLayerInputsSpec,
    spec: DecoderSpec,
    norm: int,
    *,
    bf16: bool,
) -> None:
    """Add the inputs of all layers' own embeddings; `norm`: address of its weights.

    Raises ModelLoadError as the weights do.
    """
    hidden = spec.hidden_size
    table = read_table(writer.source, refs.table, every_unit).dequantised()
    facts = np.zeros((1,), OWN)
    facts["table"], facts["rows"] = writer.keep(to_storage(table, bf16)), own.rows
    scale = np.array([own.width**0.5], np.float32)
    if bf16:  # rounded to the dtype first, like the scale of the model's embeddings
        scale = to_float32(to_bfloat16(scale))
    _pass_on(writer, hidden)
    writer.linear(refs.projection, Buffer.NORMED, Buffer.OWN, scale=hidden**-0.5)
    writer.add(
        Code.OWN_INPUT,
        target=Buffer.OWN,
        inputs=own.width,
        width=own_width(spec),
        weights=norm,
        eps=refs.norm.eps,
        scale=scale[0],
        facts=writer.keep(facts),
    )


def add_per_layer_input(
    writer: OperationWriter,
    refs: PerLayerInputRefs,
    own: PerLayerInputsSpec,
    spec: DecoderSpec,
    index: int,
) -> None:
    """Add how layer number `index` uses its own embeddings; the result is in BRANCH."""
    _pass_on(writer, spec.hidden_size)
    writer.linear(refs.gate, Buffer.NORMED, Buffer.PROJECTED)
    add_gates(
        writer,
        Buffer.OWN,
        inputs=own_width(spec),
        width=own.width,
        offset=index * own.width,
        gates=Buffer.PROJECTED,
        gate_width=own.width,
        gate_size=1,
        group=own.width,
        norm=GroupNorm.NONE,
        activation=ACTIVATIONS[spec.activation],
    )
    writer.linear(refs.up, Buffer.MIXED, Buffer.BRANCH)


def _pass_on(writer: OperationWriter, hidden: int) -> None:
    """Convert hidden states to the forms that a product reads."""
    writer.add(Code.PASS_ON, source=Buffer.HIDDEN, target=Buffer.NORMED, inputs=hidden, span=hidden)
