"""The operations of models with several hidden states per token, of which layers compute one."""

from __future__ import annotations

import numpy as np

from tgi_trio.model.matrices.references import LinearRef, NormRef, VectorRef, every_unit
from tgi_trio.model.matrices.roles import LayerStreamsRefs, StreamsRefs
from tgi_trio.model.specs.decoder import DecoderSpec, StreamsSpec
from tgi_trio.shard.checkpoint.lookup import read_table
from tgi_trio.shard.checkpoint.numbers import to_float32
from tgi_trio.shard.cpu_backend.operations.norms import NormWriter
from tgi_trio.shard.cpu_backend.operations.writer import OperationWriter
from tgi_trio.shard.cpu_backend.tables import STREAM, Buffer, Code, Epilogue

_BOTH = 2.0**-0.5  # the factor of a sum of two, which keeps its variance


class StreamWriter:
    """Writes the operations around a layer; raises ModelLoadError as the weights do."""

    def __init__(
        self, writer: OperationWriter, norms: NormWriter, spec: DecoderSpec, streams: StreamsSpec
    ) -> None:
        self._writer = writer
        self._norms = norms
        self._hidden = spec.hidden_size
        self._streams = streams

    def split(self, refs: StreamsRefs) -> None:
        """Add the projection of the embedding to all streams."""
        for number, linear in enumerate(refs.into, 1):
            self._norms.add(None, Buffer.HIDDEN)
            self._project(linear, number)
        self._add(Code.SPLIT)

    def merge(self, refs: StreamsRefs) -> None:
        """Add the projection of all streams to one hidden state."""
        for number, linear in enumerate(refs.out, 1):
            self._writer.add(
                Code.PASS_ON,
                source=Buffer.STREAMS,
                target=Buffer.NORMED,
                inputs=self._hidden,
                span=self._streams.count * self._hidden,
                offset=number * self._hidden,
            )
            self._project(linear, number)
        self._add(Code.MERGE)

    def predict(self, refs: LayerStreamsRefs) -> None:
        """Add the prediction of all streams."""
        self._route(refs)
        self._add(Code.PREDICT, coefficients=refs.prediction)

    def detour(self, refs: LayerStreamsRefs, norm: NormRef | None, feeder: int) -> None:
        """Add to hidden states their `norm`, which is in row `feeder`, and the detour through it.

        It comes after the other products that read the norm, which is overwritten.
        """
        rank = self._streams.detour_rank
        self._writer.linear(refs.detour_down, Buffer.NORMED, Buffer.PROJECTED, feeder=feeder)
        self._writer.add(
            Code.PASS_ON, source=Buffer.PROJECTED, target=Buffer.NORMED, inputs=rank, span=rank
        )
        self._writer.linear(refs.detour_up, Buffer.NORMED, Buffer.BRANCH)
        if norm is not None:
            self._norms.join(norm, 1.0, source=Buffer.HIDDEN)
        self._norms.join(refs.detour_norm, 1.0)

    def end_attention(self) -> None:
        """Add the scaling of the sum of attention and detour."""
        self._writer.add(Code.SCALE, target=Buffer.HIDDEN, width=self._hidden, scale=_BOTH)

    def correct(self, refs: LayerStreamsRefs) -> None:
        """Add the correction of all streams by the one that was computed, and that of HIDDEN."""
        self._route(refs)
        scale = refs.scale if self._streams.scaled else None
        self._add(Code.CORRECT, coefficients=refs.correction, scale=scale)

    def spread(self, post_norm: NormRef) -> None:
        """Add BRANCH, through its norm, to all streams but the first."""
        self._norms.add_in_place(post_norm, Buffer.BRANCH, self._hidden)
        self._add(Code.SPREAD)

    def _route(self, refs: LayerStreamsRefs) -> None:
        self._norms.add(refs.router_norm, Buffer.HIDDEN)
        self._writer.linear(refs.router, Buffer.NORMED, Buffer.ROUTED, scale=1.0 / self._hidden)

    def _project(self, linear: LinearRef, number: int) -> None:
        """Add a linear layer from the previous row's result to stream `number`."""
        self._writer.linear(
            linear,
            Buffer.NORMED,
            Buffer.STREAMS,
            epilogue=Epilogue.STORE,
            width=self._streams.count * self._hidden,
            place=number * self._hidden,
        )

    def _add(
        self,
        code: Code,
        *,
        coefficients: LinearRef | None = None,
        scale: VectorRef | None = None,
    ) -> None:
        facts = np.zeros((1,), STREAM)
        facts["count"], facts["active"] = self._streams.count, self._streams.active
        source = self._writer.source
        if coefficients is not None:
            numbers = read_table(source, coefficients, every_unit).dequantised()
            facts["coefficients"] = self._writer.keep(to_float32(numbers))
        if scale is not None:
            facts["scale"] = self._writer.keep(source.vector(scale.name, scale.size))
        self._writer.add(code, width=self._hidden, facts=self._writer.keep(facts))
