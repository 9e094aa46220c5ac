"""Hidden states and logits of a step, launched kernel by kernel; the host waits for nothing."""

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

MOST_CHOICES = 4096  # of a step, made on the device
# Uploads of row tables of layers with states that may be in flight: three or four a prefill step.
_SLOT_TURNS = 16


def fits_device(plan: StepPlan) -> bool:
    """Return whether the device has room for all choices of a plan; all ranks agree.

    If so, rank 0's device chooses the tokens.
    """
    drafts = 0 if plan.drafts is None else int(plan.drafts.sum())
    return len(plan.rows) + drafts <= MOST_CHOICES


def idle_steps(most: int) -> Iterator[StepPlan]:
    """Yield idle steps, one for every variant of kernels that is compiled.

    Variants are: decodes, rows of a few tokens, and decodes beside a prompt; each of them for one
    row, for few rows, whose contexts are divided among programs, and for `most` rows.
    """
    most = max(1, most)
    for rows in sorted({1, min(2, most), most}):
        for plan in (idle_plan(rows, 1), idle_chunks(rows), idle_beside_prompt(rows)):
            plan.inputs = np.full(len(plan.token_ids), -1, np.int32)
            yield plan


class StagedAdapters(Protocol):
    """Prepares the adapters of a step that is launched kernel by kernel."""

    def stage(self) -> None: ...


class StepForward:
    """Launches the steps of one model on one device, or one rank's part of them."""

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
        """`forward`, `logits`, `keep_positions`: of the model; `images`: see `StepFeatures.of`."""
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
        """Make the model's tables of positions, if the length of sequences is known."""
        if positions:
            self._keep_positions(positions)

    def hidden(
        self, plan: StepPlan, lengths: Array | None, cache: KVCache, pool: StatePool | None = None
    ) -> torch.Tensor:
        """Return the hidden states of a plan, [T, features].

        `lengths`: int64 [T] as for `Model.forward`; None for a model that does not read them.
        `pool`: given where the model keeps states.
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
        """Return the logits of all choices of a plan, float32 [C, vocab]; None if it has none."""
        chosen = self.pick(plan, hidden)
        return None if chosen is None else self._logits(chosen)

    def pick(self, plan: StepPlan, hidden: torch.Tensor) -> torch.Tensor | None:
        """Return the hidden states of all choices, [C, features]; None if the plan has none."""
        sampled = np.flatnonzero(plan.samples)
        if len(sampled) == 0:
            return None
        places = choice_positions(plan, sampled)
        if len(places) == len(hidden):
            return hidden
        (some,) = self._row_staging.upload([places])
        return hidden.index_select(0, some)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [C, vocab] of what `pick` returned."""
        return self._logits(hidden)
