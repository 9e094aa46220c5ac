"""Steps that carry prompts as recorded graphs: prompts' chunks beside decodes, choices included.

A recording has room for so many tokens and so many rows (`mixed_plans.py`); a step takes the
smallest that holds it. What it computes beyond the step's tokens is lost time, and what it saves is
the host's: so what takes the device longer than the host takes to launch it is not recorded, and
larger steps are launched kernel by kernel, as are those that are no plain tokens of plain rows:
where layers keep states, of images, with adapters.

All of a step is one launch but for what seldom is asked for: a choice with masks, or with more
biases than there is room for, is launched behind it, and so are log-probabilities of prompts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.torch_backend.attention.interface import CapturableAttention
from tgi_trio.shard.torch_backend.kv_cache import KVCache
from tgi_trio.shard.torch_backend.recordings.mixed_plans import (
    MixedSize,
    find_size,
    idle_arrays,
    idle_step,
    is_recordable,
    token_arrays,
)
from tgi_trio.shard.torch_backend.recordings.recorded_steps import (
    Capture,
    Chosen,
    DecodeForward,
    Ends,
    Graph,
    PagedImages,
    RecordedAdapters,
)
from tgi_trio.shard.torch_backend.staging import Array, Sheet, Staging, cut, packed_size, split

if TYPE_CHECKING:  # it imports Triton
    from tgi_trio.shard.torch_backend.sampling.asking import Choosing
    from tgi_trio.shard.torch_backend.sampling.device_sampler import (
        DeviceSampler,
        Found,
        Reserved,
        Told,
    )


@dataclass(slots=True)
class _Memory:
    """What a recording reads; it stays where it is."""

    sheet: Sheet  # tokens, choices, attention, on the host; one copy fills all
    tokens: list[torch.Tensor]  # as `mixed_plans.token_arrays` has them, views of it
    attention: torch.Tensor  # uint8: the attention's own
    asked: Reserved  # the sampler's own


@dataclass(slots=True)
class _Made:
    """What a recording writes."""

    picked: torch.Tensor  # [rows, features] behind which tokens are chosen
    found: Found


@dataclass(slots=True)
class _Recording:
    """A graph, the memory it reads and what it writes."""

    graph: Graph
    memory: _Memory
    scores: torch.Tensor  # [rows, >= vocab]: of all recordings
    hidden: torch.Tensor  # [tokens, features]
    made: _Made


@dataclass(frozen=True, slots=True)
class MixedStep:
    """A step that has been launched; valid until the next one is."""

    hidden: torch.Tensor  # [T, features]
    chosen: Chosen | None  # None: no row chooses. What has found nothing is still to be chosen


@dataclass(slots=True)
class _Launching:
    """How long the host takes to launch what is recorded, at the least."""

    seconds: float = float("inf")

    def measure(self, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        began = time.perf_counter()
        out = run()
        self.seconds = min(self.seconds, time.perf_counter() - began)
        return out


@dataclass(slots=True)
class MixedGraphs:
    """The graphs of one model's steps with prompts, on the device of the rank that chooses."""

    forward: DecodeForward
    attention: CapturableAttention
    capture: Capture
    device: torch.device
    ends: Ends
    sampler: DeviceSampler
    seconds: Callable[[Graph], float]  # that a replay takes on the device
    adapters: RecordedAdapters | None = None
    images: PagedImages | None = None  # where layers attend to some
    _recorded: dict[MixedSize, _Recording] = field(default_factory=dict)
    _staging: Staging = field(init=False)

    def __post_init__(self) -> None:
        self._staging = Staging(self.device)

    def forget(self) -> None:
        """Drop every recording: each holds on to the cache it was made over."""
        self._recorded.clear()

    def record(
        self, cache: KVCache, width: int, sizes: Sequence[MixedSize], scores: torch.Tensor
    ) -> None:
        """Record those of `sizes`, the largest first, that pay, for tables of `width` blocks.

        `scores` [rows, >= vocab] outlive a replay, and whoever has them replays one at a time.
        """
        lost = 0
        for size in sizes:
            if size.tokens == lost:
                continue
            launching = _Launching()
            self._recorded[size] = made = self._record(
                size, cache, width, scores[: size.rows], launching
            )
            alone = sum(size.tokens == other.tokens for other in self._recorded) == 1
            if alone and self.seconds(made.graph) > launching.seconds:
                del self._recorded[size], made
                lost = size.tokens

    def launch(
        self, plan: StepPlan, lengths: Array | None, choosing: Choosing, *, masked: bool
    ) -> MixedStep | None:
        """Compute a step and choose its tokens, unless `masked`; None: no graph fits.

        `lengths` int64 [T] as for `Model.forward`, None for one that reads none.
        """
        size = find_size(self._recorded, plan, len(choosing)) if self._holds(plan) else None
        if size is None:
            return None
        recording, told = self._recorded[size], None
        if not masked and len(choosing):
            told = self.sampler.ask(choosing, size.rows)
            if not self.sampler.fits(told):
                told = None
        self._refill(recording.memory, plan, lengths, told)
        recording.graph.replay()
        hidden = recording.hidden[: len(plan.token_ids)]
        if not len(choosing):
            return MixedStep(hidden, None)
        count, found = len(choosing), None
        if told is not None:
            found = recording.made.found.first(count, lists=told.widest > 0)
        chosen = Chosen(recording.scores[:count], found, recording.made.picked[:count])
        return MixedStep(hidden, chosen)

    def _holds(self, plan: StepPlan) -> bool:
        """Return whether a plan is of a kind that is recorded."""
        if not self._recorded or not is_recordable(plan):
            return False
        if self.adapters is not None and self.adapters.used:
            return False
        return self.images is None or not self.images.wants(plan)

    def _refill(
        self, memory: _Memory, plan: StepPlan, lengths: Array | None, told: Told | None
    ) -> None:
        """Make what a graph reads that of `plan`."""
        told = told or memory.asked.idle
        arrays = token_arrays(plan, lengths, np.flatnonzero(plan.samples))
        arrays += told.arrays
        arrays += self.attention.arrays(plan)
        self._staging.fill_from(memory.sheet, arrays)
        self.sampler.refill_entries(memory.asked, told)

    def _reserve(self, size: MixedSize, idle: StepPlan) -> _Memory:
        groups = [
            idle_arrays(size),
            self.sampler.ask_nothing(size.rows).arrays,
            self.attention.arrays(idle),
        ]
        every = [array for group in groups for array in group]
        told = torch.zeros(packed_size(every), dtype=torch.uint8, device=self.device)
        self._staging.fill(told, every)
        own, of_choices, of_attention = cut(told, groups)
        asked = self.sampler.reserve(size.rows, of_choices)
        sheet = Sheet(every, told, shared=False)
        return _Memory(sheet, split(own, groups[0]), of_attention, asked)

    def _record(
        self,
        size: MixedSize,
        cache: KVCache,
        width: int,
        scores: torch.Tensor,
        launching: _Launching,
    ) -> _Recording:
        idle = idle_step(size, width)
        memory, made = self._reserve(size, idle), list[_Made]()
        ids, positions, lengths, inputs, places = memory.tokens

        def compute() -> torch.Tensor:
            known = self.ends.tokens.fill_in(ids, inputs)
            # Anew: its tiles are found by the first layer of every run.
            batch = self.attention.reserve(idle, cache, memory.attention, decodes=False)
            hidden = self.forward(known, positions, lengths, self.attention, batch)
            picked = hidden.index_select(0, places)
            logits = self.ends.logits(picked)
            asked = memory.asked.asked
            found = self.sampler.choose(logits, asked, hidden=picked, scores=scores)
            made[:] = [_Made(picked, found)]
            return hidden

        graph, hidden = self.capture(lambda: launching.measure(compute))
        return _Recording(graph, memory, scores, hidden, made[0])
