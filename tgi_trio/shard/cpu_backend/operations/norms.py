"""The operations of norms, and how a branch with a norm joins the residual stream."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.model.matrices.references import NormRef
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.shard.checkpoint.head_norms import read_head_norms
from tgi_trio.shard.cpu_backend.operations.writer import OperationWriter
from tgi_trio.shard.cpu_backend.tables import Buffer, Code, Epilogue, Form

Array = NDArray[Any]


class NormWriter:
    """Writes norms of a family's kind; every method raises ModelLoadError as the weights do."""

    def __init__(self, writer: OperationWriter, spec: DecoderSpec) -> None:
        self._writer = writer
        self._spec = spec

    def is_centred(self, ref: NormRef) -> bool:
        """Return whether a norm subtracts the mean."""
        return (ref.kind or self._spec.norm) in ("layer", "layer_plus_one")

    def add(self, ref: NormRef | None, source: Buffer, **fields: Any) -> None:
        """Add a norm of every row, by default with activations of the next product as its result.

        None converts rows of hidden states to these forms without a norm.
        """
        if ref is None:
            self.pass_on(source, self._spec.hidden_size)
            return
        defaults = {"target": Buffer.NORMED, "epilogue": Epilogue.PASS, "scale": 1.0}
        numbers = self._numbers(ref)
        self._writer.add(Code.NORM, source=source, **(numbers | defaults | fields))

    def add_inner(self, ref: NormRef, source: Buffer) -> Buffer:
        """Add a norm of what the last operation writes to `source`; return its result's buffer."""
        self._writer.rows[-1]["forms"] |= Form.WIDE
        self.add(ref, source, target=Buffer.MIXED)
        return Buffer.MIXED

    def pass_on(self, source: Buffer, width: int) -> None:
        """Add a conversion of rows [width] to activations of the next product, without a norm."""
        self._writer.add(
            Code.PASS_ON, source=source, target=Buffer.NORMED, inputs=width, span=width
        )

    def add_in_place(self, ref: NormRef, target: Buffer, width: int, offset: int = 0) -> None:
        """Add a norm of part of every row of a buffer, `width` features each."""
        fields = {"width": width, "offset": offset}
        self._writer.add(Code.NORM_ROWS, target=target, **fields, **self._numbers(ref))

    def add_heads(self, ref: NormRef, target: Buffer, width: int, offset: int, heads: int) -> None:
        """Add a norm of each of this rank's `heads` heads in every row of a buffer."""
        if ref.heads is None:
            weight, bias = self.read_weight(ref), self.read_bias(ref)
            vectors = [None if each is None else np.tile(each, heads) for each in (weight, bias)]
        else:
            mine = self._writer.portion.share(ref.heads)
            vectors = [read_head_norms(self._writer.source, ref, mine).reshape(-1), None]
        weights, biases = (self._writer.keep(each) for each in vectors)
        self._writer.add(
            Code.NORM_ROWS,
            target=target,
            width=width,
            offset=offset,
            head_dim=ref.size,
            inputs=heads * ref.size,
            weights=weights,
            bias=biases,
            centred=self.is_centred(ref),
            eps=ref.eps,
        )

    def join(
        self,
        ref: NormRef,
        scale: float,
        *,
        source: Buffer = Buffer.BRANCH,
        target: Buffer = Buffer.HIDDEN,
    ) -> None:
        """Add a branch through its norm to the residual stream, or to `target`."""
        self.add(ref, source, target=target, epilogue=Epilogue.ADD, scale=scale)

    def keep_weight(self, ref: NormRef | None) -> int:
        """Keep a norm's weights; return their address, 0 for none."""
        return self._writer.keep(None if ref is None else self.read_weight(ref))

    def read_weight(self, ref: NormRef) -> Array | None:
        """Return a norm's weights, float32, or None."""
        if not ref.weight:
            return None
        weight = self._writer.source.vector(ref.weight, ref.size)
        kind = ref.kind or self._spec.norm
        return weight + np.float32(1.0) if kind.endswith("plus_one") else weight

    def read_bias(self, ref: NormRef) -> Array | None:
        """Return a norm's bias, float32, or None."""
        return self._writer.source.vector(ref.bias, ref.size) if ref.bias else None

    def _numbers(self, ref: NormRef) -> dict[str, Any]:
        return {
            "inputs": ref.size,
            "weights": self.keep_weight(ref),
            "bias": self._writer.keep(self.read_bias(ref)),
            "centred": self.is_centred(ref),
            "eps": ref.eps,
        }
