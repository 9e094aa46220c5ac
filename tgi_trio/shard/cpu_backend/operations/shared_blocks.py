"""The operations of a block of attention and MLP that several layers use (Zamba2).

Its matrices are packed once. What a use adds to them is of low rank, so it is computed beside them
and added before heads turn and gates open.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tgi_trio.model.matrices.roles import AttentionRefs, LayerRefs, LowRankRefs, MlpRefs, SharedRefs
from tgi_trio.model.specs.decoder import DecoderSpec, LayerSpec, SharedBlock
from tgi_trio.shard.cpu_backend.operations.attention import AttentionWriter
from tgi_trio.shard.cpu_backend.operations.gates import gate_second_half
from tgi_trio.shard.cpu_backend.operations.norms import NormWriter
from tgi_trio.shard.cpu_backend.operations.writer import OperationWriter
from tgi_trio.shard.cpu_backend.tables import ACTIVATIONS, Buffer, Code, Epilogue


def opening_width(spec: DecoderSpec, shared: SharedBlock) -> int:
    """Return the features of a row with gates, ups and the low-rank input of both."""
    return 2 * spec.mlp_width + shared.rank


class SharedWriter:
    """Writes the uses of shared blocks; methods raise ModelLoadError as the weights do."""

    def __init__(
        self,
        writer: OperationWriter,
        norms: NormWriter,
        heads: AttentionWriter,
        spec: DecoderSpec,
    ) -> None:
        self._writer = writer
        self._norms = norms
        self._heads = heads
        self._spec = spec

    def keep_first(self) -> None:
        """Add a copy of the first layer's input, which every use reads."""
        self._copy(self._spec.hidden_size)

    def use(self, index: int, refs: LayerRefs, layer: LayerSpec) -> None:
        """Add the block of layer number `index`, up to the norm of the layer's mixer, which the
        last row converts to activations.
        """
        own, shared = refs.shared, layer.shared
        if own is None or shared is None or refs.attention is None or refs.attention_norm is None:
            raise ValueError(f"layer {index} uses a block that lacks parts")
        if not isinstance(refs.mlp, MlpRefs):
            raise TypeError(f"layer {index} uses a block without a dense MLP")
        self._copy(0)
        self._norms.add(refs.attention_norm, Buffer.BOTH)
        self._attend(index, refs.attention, own, layer)
        self._norms.add(refs.mlp_norm, Buffer.BRANCH)
        self._feed(refs.mlp, own.inner, shared)
        self._join(own)

    def _copy(self, offset: int) -> None:
        hidden = self._spec.hidden_size
        self._writer.add(
            Code.COPY,
            source=Buffer.HIDDEN,
            target=Buffer.BOTH,
            inputs=hidden,
            width=2 * hidden,
            offset=offset,
        )

    def _attend(
        self, index: int, attention: AttentionRefs, own: SharedRefs, layer: LayerSpec
    ) -> None:
        """Add attention over the norm that was added last; the result is in BRANCH."""
        writer, sizes = self._writer, self._spec.sizes(layer)
        feeder = len(writer.rows) - 1
        writer.linear(attention.qkv, Buffer.NORMED, Buffer.QKV, reused=True)
        if own.qkv is not None:
            queries, keys = sizes.heads * sizes.dim, sizes.kv_heads * sizes.dim
            width = queries + keys + sizes.kv_heads * sizes.value_dim
            source = _Part(0, len(own.qkv.ups) * _rank(own.qkv))
            writer.linear(own.qkv.down, Buffer.NORMED, Buffer.PROJECTED, feeder=feeder)
            self._raise(own.qkv, source, Buffer.QKV, (0, queries, queries + keys), width)
        says = self._heads.attend(index, attention, layer)
        writer.linear(attention.output, says, Buffer.BRANCH, reused=True)

    def _feed(self, mlp: MlpRefs, change: LowRankRefs, shared: SharedBlock) -> None:
        """Add the MLP over the norm that was added last; the result is in BRANCH."""
        writer, spec, width = self._writer, self._spec, opening_width(self._spec, shared)
        feeder, inner = len(writer.rows) - 1, spec.mlp_width
        row: dict[str, Any] = {"feeder": feeder, "width": width}
        writer.linear(mlp.inner, Buffer.NORMED, Buffer.PROJECTED, reused=True, **row)
        writer.linear(change.down, Buffer.NORMED, Buffer.PROJECTED, place=2 * inner, **row)
        self._raise(change, _Part(2 * inner, width), Buffer.PROJECTED, (0,), width)
        gate_second_half(writer, width, inner, ACTIVATIONS[spec.activation])
        writer.linear(mlp.down, Buffer.MIXED, Buffer.BRANCH, reused=True)

    def _raise(
        self,
        change: LowRankRefs,
        source: _Part,
        target: Buffer,
        places: Sequence[int],
        width: int,
    ) -> None:
        """Add the second of two low-rank matrices for each of `places` in rows [width] of `target`;
        what they read is side by side in PROJECTED.
        """
        rank = _rank(change)
        for i, (up, place) in enumerate(zip(change.ups, places, strict=True)):
            self._writer.add(
                Code.PASS_ON,
                source=Buffer.PROJECTED,
                target=Buffer.MIXED,
                inputs=rank,
                span=source.width,
                offset=source.place + i * rank,
            )
            self._writer.linear(
                up,
                Buffer.MIXED,
                target,
                place=place,
                width=width,
                epilogue=Epilogue.ADD,
            )

    def _join(self, own: SharedRefs) -> None:
        """Add the sum of the hidden state and what the block says, and its norm."""
        hidden = self._spec.hidden_size
        self._norms.pass_on(Buffer.BRANCH, hidden)
        self._writer.linear(
            own.exit, Buffer.NORMED, Buffer.BOTH, width=2 * hidden, epilogue=Epilogue.ADD
        )
        self._norms.add_in_place(own.mixer_norm, Buffer.BOTH, 2 * hidden)
        self._writer.add(
            Code.PASS_ON, source=Buffer.BOTH, target=Buffer.NORMED, inputs=hidden, span=2 * hidden
        )


class _Part(NamedTuple):
    """A part of rows of PROJECTED."""

    place: int  # of its first feature
    width: int  # features of a row


def _rank(change: LowRankRefs) -> int:
    return change.ups[0].pieces[0].matrix.columns
