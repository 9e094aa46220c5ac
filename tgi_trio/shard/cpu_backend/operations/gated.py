"""The operations of layers between several hidden states of a token and gates that mix them."""

from __future__ import annotations

import numpy as np

from tgi_trio.model.matrices.references import LinearRef
from tgi_trio.model.matrices.roles import GatesRefs
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.model.specs.gated_streams import GatedStreamsSpec
from tgi_trio.shard.cpu_backend.operations.norms import NormWriter
from tgi_trio.shard.cpu_backend.operations.writer import OperationWriter
from tgi_trio.shard.cpu_backend.tables import GATED, Activation, Buffer, Code, Epilogue


class GatesWriter:
    """Writes the operations around parts of layers; raises ModelLoadError as the weights do."""

    def __init__(
        self,
        writer: OperationWriter,
        norms: NormWriter,
        spec: DecoderSpec,
        streams: GatedStreamsSpec,
    ) -> None:
        self._writer = writer
        self._norms = norms
        self._hidden = spec.hidden_size
        self._streams = streams
        self._said: float | None = None  # the scale of what is in BRANCH, to be added

    def repeat(self) -> None:
        """Add the copying of what is embedded to all states."""
        self._add(Code.REPEAT)

    def hold(self, scale: float) -> None:
        """Have what a part says, in BRANCH, added to all states, times `scale`, by what follows."""
        self._said = scale

    def settle(self) -> None:
        """Add what has been said, so that all states are those behind it."""
        if self._said is not None:
            self._settle()

    def read(self, refs: GatesRefs, *, last: bool = False) -> None:
        """Add what the following part reads of all states, in the forms that products read.

        `last`: it is in HIDDEN instead.
        """
        weights, eps = self._norms.keep_weight(refs.norm), refs.norm.eps
        self._settle(weights=weights, eps=eps)
        feeder = len(self._writer.rows) - 1
        narrow, *factors = refs.inner.pieces
        for piece in factors:
            self._writer.linear(LinearRef((piece,)), Buffer.NORMED, Buffer.SHARES, feeder=feeder)
        self._writer.linear(
            LinearRef((narrow,)),
            Buffer.NORMED,
            Buffer.MIXED,
            feeder=feeder,
            epilogue=Epilogue.ACTIVATE,
            activation=Activation.SILU,
        )
        self._writer.linear(refs.gates, Buffer.MIXED, Buffer.PROJECTED)
        self._add(
            Code.MIX,
            target=Buffer.HIDDEN if last else Buffer.NORMED,
            epilogue=Epilogue.STORE if last else Epilogue.PASS,
            weights=weights,
            eps=eps,
        )

    def pick(self) -> None:
        """Add the conversion of the rows of HIDDEN whose logits are wanted."""
        self._add(Code.PICK, source=Buffer.HIDDEN, target=Buffer.NORMED, wanted_only=1)

    def _settle(self, **fields: float) -> None:
        said, self._said = self._said, None
        scale = 0.0 if said is None else said
        adds = said is not None
        self._add(Code.SETTLE, adds=adds, target=Buffer.NORMED, scale=scale, **fields)

    def _add(self, code: Code, *, adds: bool = False, **fields: float) -> None:
        facts = np.zeros((1,), GATED)
        facts["count"], facts["adds"] = self._streams.count, adds
        self._writer.add(code, width=self._hidden, facts=self._writer.keep(facts), **fields)
