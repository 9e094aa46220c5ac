"""A pipeline stage: a decoder's consecutive layers, between the previous rank and the next one."""

from __future__ import annotations

from typing import Any

import torch

from tgi_trio.model.stages import Stage
from tgi_trio.shard.torch_backend.attention.interface import AttentionBackend
from tgi_trio.shard.torch_backend.models.attending import RotaryTables
from tgi_trio.shard.torch_backend.models.decoder import Decoder, Ranks
from tgi_trio.shard.torch_backend.states.steps import StepStates
from tgi_trio.shard.torch_backend.step_features import StepFeatures


class StagedDecoder(Decoder):
    """One stage of a pipeline; see `Stage`. Every step has to be computed on all stages."""

    def __init__(self, *given: Any, stage: Stage, neighbours: Ranks, **parts: Any) -> None:
        """The rest as for `Decoder`; `spec` and `layers` have this stage's layers alone.

        `embedding` has no rows if the stage looks none up.
        """
        super().__init__(*given, **parts)
        self.stage = stage
        self._neighbours = neighbours
        # Only the last stage has a head, and can compute log-probabilities of prompt tokens.
        self.predicts_prompt = stage.is_last

    @property
    def capturable(self) -> bool:
        """False: a recorded step could not wait for another rank's."""
        return False

    def embed(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the input [T, hidden] of this stage's first layer, for tokens int64 [T]."""
        if self.stage.is_first:
            return super().embed(token_ids, positions)
        room = self.embedding.new_empty((len(token_ids), self.spec.hidden_size))
        return self._neighbours.receive(room, self.stage.before)

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
        """Return the output of this stage's layers for `x`; send it to the next stage, if any."""
        hidden = super().run_layers(
            x, tables, attention, batch, states, features=features, own=own, ids=ids
        )
        if not self.stage.is_last:
            self._neighbours.send(hidden, self.stage.after)
        return hidden

    def raw_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [S, vocab] of `hidden`; [S, 0] before the last stage."""
        if not self.stage.is_last:
            return hidden.new_empty((len(hidden), 0))
        return super().raw_logits(hidden)
