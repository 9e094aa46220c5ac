"""The operations of the embedding, with what follows it before the first layer."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.model.matrices.references import every_unit
from tgi_trio.model.matrices.roles import OuterRefs
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.shard.checkpoint.lookup import read_table
from tgi_trio.shard.checkpoint.numbers import to_bfloat16, to_float32
from tgi_trio.shard.cpu_backend.operations.norms import NormWriter
from tgi_trio.shard.cpu_backend.operations.per_layer_inputs import add_per_layer_inputs
from tgi_trio.shard.cpu_backend.operations.writer import OperationWriter
from tgi_trio.shard.cpu_backend.packing import to_storage
from tgi_trio.shard.cpu_backend.tables import Buffer, Code
from tgi_trio.shard.positions.sines import sine_positions


def add_embedding(
    writer: OperationWriter, norms: NormWriter, spec: DecoderSpec, outer: OuterRefs, *, bf16: bool
) -> NDArray[Any] | None:
    """Add the embedding of tokens, up to what the first layer reads.

    Return its rows as numbers [vocabulary, features], None if they are kept as codes. Raises
    ModelLoadError as the weights do.
    """
    numbers: NDArray[Any] | None = None
    embedding = read_table(writer.source, outer.embedding, every_unit)
    scale = np.array([spec.embedding_scale], np.float32)
    if bf16:  # rounded to the dtype first, as in Gemma's training
        scale = to_float32(to_bfloat16(scale))
    packing = writer.packing(embedding.parts)
    if packing is None or packing.kind.floating or packing.order:
        numbers = np.ascontiguousarray(to_storage(embedding.dequantised(), bf16))
        table = writer.keep(numbers)
    else:
        table = writer.pack_codes(embedding.parts, packing)
        writer.quantised.add(len(writer.rows), packing)
    width = spec.embedding_width or spec.hidden_size
    writer.add(
        Code.EMBED,
        target=Buffer.BRANCH if outer.embedding_in else Buffer.HIDDEN,
        weights=table,
        inputs=width,
        width=width,
        scale=scale[0],
    )
    if outer.embedding_in is not None:
        norms.pass_on(Buffer.BRANCH, width)
        writer.linear(outer.embedding_in, Buffer.NORMED, Buffer.HIDDEN)
    rows = None
    if outer.positions is not None:
        rows = read_table(writer.source, outer.positions, every_unit).dequantised()
    elif spec.sine_positions:
        rows = sine_positions(spec.position_rows, spec.hidden_size)
    if rows is not None:
        writer.add(
            Code.PLACE,
            target=Buffer.HIDDEN,
            weights=writer.keep(to_storage(rows, bf16)),
            width=spec.hidden_size,
            offset=spec.position_offset,
        )
    if outer.embedding_norm is not None:
        norms.add_in_place(outer.embedding_norm, Buffer.HIDDEN, spec.hidden_size)
    if outer.per_layer_inputs is not None and spec.per_layer_inputs is not None:
        norm = norms.keep_weight(outer.per_layer_inputs.norm)
        add_per_layer_inputs(
            writer, outer.per_layer_inputs, spec.per_layer_inputs, spec, norm, bf16=bf16
        )
    return numbers
