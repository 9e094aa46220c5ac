"""Reads adapters for one rank of a model, beside the base that they change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tgi_trio.ipc.adapters import AdapterOrder
from tgi_trio.model.adapters.sites import EVERYTHING, AdapterScope
from tgi_trio.model.config import ModelConfig
from tgi_trio.model.matrices.references import Share
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.shard.adapters.base_weights import BaseWeights
from tgi_trio.shard.adapters.known_norms import KnownNorms
from tgi_trio.shard.adapters.numbers import AdapterNumbers, read_adapter_numbers


@dataclass(frozen=True, slots=True)
class AdapterReader:
    """What all adapters of a rank are read with."""

    config: ModelConfig  # of the base
    spec: DecoderSpec
    share: Share  # of this rank
    max_rank: int  # of adapters
    adds_biases: bool = True  # as for `read_adapter_numbers`, like the next one
    scope: AdapterScope = EVERYTHING
    norms: KnownNorms = field(default_factory=KnownNorms)

    @contextmanager
    def open(self, order: AdapterOrder) -> Iterator[AdapterNumbers]:
        """Yield an adapter, whose modules are read within the block; raises ModelLoadError."""
        with BaseWeights(self.config, self.spec) as base:
            yield read_adapter_numbers(
                order.folder,
                self.spec,
                self.share,
                base,
                max_rank=self.max_rank,
                expected=order.sha256,
                adds_biases=self.adds_biases,
                scope=self.scope,
                known=self.norms,
            )
