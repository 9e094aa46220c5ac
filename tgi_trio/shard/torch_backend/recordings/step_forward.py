"""A step's hidden states and logits on a device, launched kernel by kernel; nothing waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import torch

from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.sampling.choosing import choice_positions
from tgi_trio.shard.torch_backend.attention.interface import AttentionBackend
from tgi_trio.shard.torch_backend.kv_cache import KVCache
from tgi_trio.shard.torch_backend.recordings.decode_plans import (
    idle_beside_prompt,
    idle_chunks,
    idle_plan,
)
from tgi_trio.shard.torch_backend.recordings.recorded_steps import (
    DecodeForward,
)
from tgi_trio.shard.torch_backend.recordings.token_source import TokenSource
from tgi_trio.shard.torch_backend.staging import Array, Staging
from tgi_trio.shard.torch_backend.states.pool import StatePool
from tgi_trio.shard.torch_backend.states.steps import StepStates
from tgi_trio.shard.torch_backend.step_features import ImageStates, StepFeatures

MOST_CHOICES = 4096  # of a step that are made on the device
# Copies of what layers with states want to know of rows: three or four a step that prefills.
_SLOT_TURNS = 16


def fits_device(plan: StepPlan) -> bool:
    """Return whether a device has room for the plan's choices; every rank says the same.

    Rank 0 then chooses the plan's tokens there.
    """
    guesses = 0 if plan.drafts is None else int(plan.drafts.sum())
    return len(plan.rows) + guesses <= MOST_CHOICES


def idle_steps(most: int) -> Iterator[StepPlan]:
    """Yield steps of nothing, one of every kind that is compiled for itself.

    Kernels of decodes, of a few tokens each and of decodes beside a prompt are kinds of their own,
    and so are those of a lone row, of few rows, whose contexts are divided as well, and of up to
    `most`.
    """
    most = max(1, most)
    for rows in sorted({1, min(2, most), most}):
        for plan in (idle_plan(rows, 1), idle_chunks(rows), idle_beside_prompt(rows)):
            plan.inputs = np.full(len(plan.token_ids), -1, np.int32)
            yield plan


class StagedAdapters(Protocol):
    """What computes the adapters of the step at hand, launched kernel by kernel."""

    def stage(self) -> None: ...


class StepForward:
    """Computes the steps of one model on one device, as every rank does that has a part of it."""

    def __init__(
        self,
        forward: DecodeForward,
        logits: Callable[[torch.Tensor], torch.Tensor],
        attention: AttentionBackend,
        tokens: TokenSource,
        device: torch.device,
        keep_positions: Callable[[int], None],
        adapters: StagedAdapters | None = None,
        images: ImageStates | None = None,
    ) -> None:
        """`forward`, `logits` and `keep_positions` are the model's; `images`: as
        `StepFeatures.of` has them.
        """
        self._adapters = adapters
        self._images = images
        self.device = device
        self._keep_positions = keep_positions
        self._forward = forward
        self._logits = logits
        self._attention = attention
        self._tokens = tokens
        self._staging = Staging(device)
        self._row_staging = Staging(device)
        self._slot_staging = Staging(device, turns=_SLOT_TURNS)

    def make_room(self, positions: int) -> None:
        """Keep what steps need of the positions of sequences, if it is known how many there are."""
        if positions:
            self._keep_positions(positions)

    def hidden(
        self, plan: StepPlan, lengths: Array | None, cache: KVCache, pool: StatePool | None = None
    ) -> torch.Tensor:
        """Return hidden states [T, hidden]; `lengths` int64 [T] as for `Model.forward`, None for
        one that reads none.

        `pool`: where the model keeps states.
        """
        inputs = np.empty(0, np.int32) if plan.inputs is None else plan.inputs
        ids, positions, every, unknown = self._staging.upload(
            [
                plan.token_ids,
                plan.turning_positions,
                plan.positions if lengths is None else lengths,
                inputs,
            ]
        )
        if plan.inputs is not None:
            ids = self._tokens.fill_in(ids, unknown)
        if self._adapters is not None:
            self._adapters.stage()
        batch = self._attention.prepare(plan, cache)
        features = StepFeatures.of(plan, self.device, self._images)
        states = None if pool is None else StepStates.of(plan, pool, self._slot_staging.send)
        return self._forward(
            ids, positions, every, self._attention, batch, states, features=features
        )

    def scores(self, plan: StepPlan, hidden: torch.Tensor) -> torch.Tensor | None:
        """Return the logits of every choice of the plan, float32 [C, vocab]; None: it has none."""
        chosen = self.pick(plan, hidden)
        return None if chosen is None else self._logits(chosen)

    def pick(self, plan: StepPlan, hidden: torch.Tensor) -> torch.Tensor | None:
        """Return the hidden states of every choice, [C, features]; None: the plan has none."""
        sampled = np.flatnonzero(plan.samples)
        if len(sampled) == 0:
            return None
        places = choice_positions(plan, sampled)
        if len(places) == len(hidden):
            return hidden
        (some,) = self._row_staging.upload([places])
        return hidden.index_select(0, some)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [C, vocab] of hidden states that `pick` has returned."""
        return self._logits(hidden)
