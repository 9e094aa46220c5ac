"""A decoder whose tokens have several hidden states, mixed by gates (`GatedStreamsSpec`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tgi_trio.shard.torch_backend.attention.interface import AttentionBackend
from tgi_trio.shard.torch_backend.attention.paged.few_heads import HeadProjection
from tgi_trio.shard.torch_backend.layers.linears.few_rows import Projection
from tgi_trio.shard.torch_backend.layers.residual import Addends
from tgi_trio.shard.torch_backend.layers.streams.gated_streams import (
    LayerOutput,
    StreamGates,
    add_said,
)
from tgi_trio.shard.torch_backend.models.attending import RotaryTables
from tgi_trio.shard.torch_backend.models.decoder import Decoder
from tgi_trio.shard.torch_backend.states.steps import StepStates
from tgi_trio.shard.torch_backend.step_features import StepFeatures


class GatedDecoder(Decoder):
    """A decoder of layers that read and write several hidden states, and may embed n-grams."""

    def __init__(self, *given: Any, gates: StreamGates, **parts: Any) -> None:
        """`gates`: those before the head; the rest as for `Decoder`."""
        super().__init__(*given, **parts)
        self.gates = gates
        self.shows_streams = False  # `forward` returns the hidden states behind their mixture

    def projections(self) -> Iterator[Projection]:
        """Yield none: what linears read is mixed by gates."""
        yield from ()

    def head_projections(self) -> Iterator[tuple[HeadProjection, Addends | None]]:
        """Yield none, as `projections` does."""
        yield from ()

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        lengths: torch.Tensor,
        attention: AttentionBackend,
        batch: Any,
        states: StepStates | None = None,
        *,
        features: StepFeatures | None = None,
    ) -> torch.Tensor:
        batch.cache.keep_turns(batch.slots, positions)
        x, tables = self.begin(token_ids, positions, lengths)
        if features is not None:
            x, _ = self.place(x, features)
        streams, addend = self._run_all(
            x.repeat(1, self.gates.count), token_ids, tables, attention, batch, states
        )
        read = self.gates.read(streams, addend)
        return torch.cat((read.mixed, read.streams), dim=-1) if self.shows_streams else read.mixed

    def run_layers(
        self,
        x: torch.Tensor,
        tables: RotaryTables,
        attention: AttentionBackend,
        batch: Any,
        states: StepStates | None = None,
        *,
        features: StepFeatures | None = None,
        own: torch.Tensor | None = None,
        ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the hidden states [T, count * hidden] after all layers, given those before them.

        `ids`: the tokens, needed by layers with n-grams; there are neither `features` nor `own`.
        """
        found = self._run_all(x, ids, tables, attention, batch, states)
        return add_said(*found, self.gates.count)

    def _run_all(
        self,
        streams: torch.Tensor,
        token_ids: torch.Tensor | None,
        tables: RotaryTables,
        attention: AttentionBackend,
        batch: Any,
        states: StepStates | None,
    ) -> tuple[torch.Tensor, LayerOutput | None]:
        """Return hidden states [T, count * hidden] of all layers, and what is still to be added."""
        addend: LayerOutput | None = None
        for index in range(len(self.layers)):
            streams, addend = self._run(
                index, streams, addend, token_ids, tables, attention, batch, states
            )
        return streams, addend

    def _run(
        self,
        index: int,
        streams: torch.Tensor,
        addend: LayerOutput | None,
        token_ids: torch.Tensor | None,
        tables: RotaryTables,
        attention: AttentionBackend,
        batch: Any,
        states: StepStates | None,
    ) -> tuple[torch.Tensor, LayerOutput]:
        """Return hidden states [T, count * hidden] of a layer, and what is still to be added."""
        layer = self.layers[index]
        if layer.gates is None or layer.mlp is None:
            raise ValueError(f"layer {index} lacks gates or an MLP")
        if layer.ngrams is not None:
            if states is None or token_ids is None:
                raise ValueError(f"layer {index} keeps states, and the step has none")
            own = states.layers[index]
            streams, addend = add_said(streams, addend, self.gates.count), None
            streams = layer.ngrams.add(streams, token_ids, own, states.steps)
        streams, read, factors = layer.gates.attention.read(streams, addend)
        output = self._runner.mix(index, read, tables, attention, batch, states)
        streams, read, factors = layer.gates.mlp.read(streams, LayerOutput(output, factors))
        return streams, LayerOutput(self._runner.feed(layer.mlp, read), factors)

    def nbytes(self) -> int:
        return super().nbytes() + self.gates.nbytes()
