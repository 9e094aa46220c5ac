"""The operations of layers between a sum of a token's hidden states and all of them."""

from __future__ import annotations

import numpy as np

from tgi_trio.model.matrices.references import TensorRef
from tgi_trio.model.matrices.roles import HyperRefs
from tgi_trio.model.specs.decoder import DecoderSpec, HyperSpec
from tgi_trio.shard.checkpoint.numbers import Floats
from tgi_trio.shard.cpu_backend.operations.writer import OperationWriter
from tgi_trio.shard.cpu_backend.tables import HYPER, Code


class HyperWriter:
    """Writes the operations around parts of layers; raises ModelLoadError as the weights do."""

    def __init__(self, writer: OperationWriter, spec: DecoderSpec, hyper: HyperSpec) -> None:
        self._writer = writer
        self._spec = spec
        self._facts = np.zeros((1,), HYPER)
        self._facts["count"] = hyper.count
        self._facts["read"], self._facts["read_eps"] = 1.0, hyper.eps
        self._facts["added"], self._facts["added_eps"] = hyper.added, hyper.added_eps
        self._facts["iterations"] = hyper.iterations
        self._codes = (Code.FORK, Code.GATHER, Code.SCATTER)
        if hyper.iterations:
            self._codes = (Code.FORK_MIXED, Code.GATHER_MIXED, Code.SCATTER_MIXED)

    def fork(self) -> None:
        """Add the copying of what is embedded to all states."""
        self._add(self._codes[0], self._facts)

    def gather(self, refs: HyperRefs) -> None:
        """Add what the following part reads, or the head."""
        facts = self._facts.copy()
        facts["weights"] = refs.mix.shape[0]
        for name, ref in (("mix", refs.mix), ("bases", refs.base), ("scales", refs.scale)):
            facts[name] = self._writer.keep(self._read(ref))
        self._add(self._codes[1], facts, eps=self._spec.norm_eps)

    def join(self) -> None:
        """Add the mean of all states, where they are mixed."""
        self._add(Code.JOIN_MIXED, self._facts)

    def scatter(self, scale: float) -> None:
        """Add what the part that ends says, in BRANCH, times `scale`, to all states."""
        self._add(self._codes[2], self._facts, scale=scale)

    def _read(self, ref: TensorRef) -> Floats:
        return self._writer.source.array(ref.name, ref.shape)

    def _add(self, code: Code, facts: np.ndarray, **fields: float) -> None:
        width, kept = self._spec.hidden_size, self._writer.keep(facts)
        self._writer.add(code, width=width, facts=kept, **fields)
