"""Steps of a rank that chooses no tokens: it computes its part of rank 0's steps.

The tokens that rank 0 chose are broadcast by its device when the next step begins
(`token_source.py`), so a follower, too, launches that step before anybody has read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from tgi_trio.shard.contract import (
    Choices,
    ShardSequence,
    StepPlan,
    StepResult,
)
from tgi_trio.shard.machine.accelerator import record_event
from tgi_trio.shard.torch_backend.kv_cache import KVCache
from tgi_trio.shard.torch_backend.prompt_logprobs import PromptLogprobs
from tgi_trio.shard.torch_backend.recordings.decode_graphs import DecodeGraphs
from tgi_trio.shard.torch_backend.recordings.decode_plans import as_decodes
from tgi_trio.shard.torch_backend.recordings.step_forward import (
    StepForward,
    fits_device,
    idle_steps,
)
from tgi_trio.shard.torch_backend.staging import Array
from tgi_trio.shard.torch_backend.states.pool import StatePool

if TYPE_CHECKING:  # it imports Triton
    from tgi_trio.shard.torch_backend.recordings.mixed_graphs import MixedGraphs


@dataclass(slots=True)
class _Followed:
    """See `Pending`."""

    rows: int
    done: torch.Event

    def proceed(self) -> None:
        return None

    def result(self) -> StepResult:
        """Wait for the device; this rank has chosen nothing."""
        self.done.synchronize()
        return StepResult(Choices.none(self.rows), 0, 0)


def _leave(values: torch.Tensor) -> torch.Tensor:
    return values  # not copied down: rank 0 reports them


class FollowedSteps:
    """Launches this rank's part of each step; see `DeviceSteps` for rank 0's."""

    serve = staticmethod(fits_device)

    def __init__(
        self, computes: StepForward, graphs: DecodeGraphs | None, mixed: MixedGraphs | None
    ) -> None:
        """`graphs`: recordings of what rank 0 records, without the choice; `mixed`: of prompts."""
        self._computes = computes
        self._graphs = graphs
        self._mixed = mixed

    @property
    def looks_up(self) -> bool:
        """Whether recorded steps look up n-grams: never with several ranks."""
        return False

    def chains(self, plan: StepPlan) -> bool:
        """Return whether a step may follow unread drafts: never with several ranks."""
        return False

    def launch(
        self,
        plan: StepPlan,
        lengths: Array | None,
        cache: KVCache,
        prompts: PromptLogprobs,
        pool: StatePool | None = None,
    ) -> _Followed:
        """Launch this rank's part of a plan, with the same collectives as rank 0, in its order."""
        if not self._replay(plan, lengths):
            hidden = None if self._mixed is None else self._mixed.replay(plan, lengths)
            if hidden is not None:
                prompts.launch(plan, hidden, _leave)
            else:
                hidden = self._computes.hidden(plan, lengths, cache, pool)
                prompts.launch(plan, hidden, _leave)
                self._computes.scores(plan, hidden)
        return _Followed(len(plan.rows), record_event(self._computes.device))

    def _replay(self, plan: StepPlan, lengths: Array | None) -> bool:
        """Replay a step of decodes; False if no recording fits."""
        decodes = None if self._graphs is None else as_decodes(plan)
        if self._graphs is None or decodes is None:
            return False
        return self._graphs.replay(decodes, lengths)

    def drop(self, sequence: ShardSequence) -> None:
        return None

    def make_room(self, rows: int, positions: int) -> None:
        """Allocate what steps need, before free memory is measured."""
        self._computes.make_room(positions)

    def warm_up(self, cache: KVCache, most: int, pool: StatePool | None = None) -> None:
        """Run the kinds of steps that no recording has run; see `DeviceSteps.warm_up`."""
        for plan in idle_steps(most):
            plan.samples = np.ones(len(plan.context_lengths), np.bool_)
            ones = np.ones(len(plan.token_ids), np.int64)
            self._computes.scores(plan, self._computes.hidden(plan, ones, cache, pool))
