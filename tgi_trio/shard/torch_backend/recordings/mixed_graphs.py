"""Steps that carry prompts as recorded graphs: prompts' chunks beside decodes, choices included.

A recording has room for so many tokens and so many rows (`mixed_plans.py`); a step takes the
smallest that holds it. What it computes beyond the step's tokens is lost time, and what it saves is
the host's: so what takes the device longer than the host takes to launch it is not recorded, and
larger steps are launched kernel by kernel, as are those with tokens of images, or rows that attend
to some. Steps in which any row has an adapter have recordings of their own, one for each number of
tokens. Where layers keep states, there are recordings of few tokens, with room for few rows of more
than one. Of several ranks each records its part, and all the same steps.

All of a step is one launch but for what seldom is asked for: a choice with masks, or with more
biases than there is room for, is launched behind it, and so are log-probabilities of prompts.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.torch_backend.attention.interface import CapturableAttention
from tgi_trio.shard.torch_backend.kv_cache import KVCache
from tgi_trio.shard.torch_backend.layers.slotted_linear import ReservedTiles
from tgi_trio.shard.torch_backend.recordings.mixed_plans import (
    MixedSize,
    chosen_places,
    find_size,
    idle_arrays,
    idle_step,
    is_recordable,
    row_room,
    token_arrays,
    widest_sizes,
)
from tgi_trio.shard.torch_backend.recordings.recorded_steps import (
    Capture,
    CaptureError,
    Chosen,
    Compute,
    DecodeForward,
    Ends,
    Graph,
    PagedImages,
    RecordedAdapters,
    StepKind,
)
from tgi_trio.shard.torch_backend.staging import Array, Sheet, Staging, cut, packed_size, split
from tgi_trio.shard.torch_backend.states.pool import StatePool
from tgi_trio.shard.torch_backend.states.recorded_rows import RecordedRows, idle_slots
from tgi_trio.shard.torch_backend.states.steps import state_arrays

if TYPE_CHECKING:  # it imports Triton
    from tgi_trio.shard.torch_backend.sampling.asking import Choosing
    from tgi_trio.shard.torch_backend.sampling.device_sampler import (
        Found,
        Reserved,
        Told,
    )


@dataclass(slots=True)
class _Memory:
    """What the recordings of a size read; it stays where it is."""

    size: MixedSize
    sheet: Sheet  # tokens, choices, attention, on the host; one copy fills all
    tokens: list[torch.Tensor]  # as `mixed_plans.token_arrays` has them, views of it
    rows: RecordedRows | None  # that layers with states see
    attention: torch.Tensor  # uint8: the attention's own
    asked: Reserved | None  # the sampler's own
    adapters: ReservedTiles | None  # the adapters' own


@dataclass(slots=True)
class _Made:
    """What a recording writes."""

    picked: torch.Tensor  # [rows, features] behind which tokens are chosen
    found: Found | None  # None: another rank's device chooses


@dataclass(slots=True)
class _Recording:
    """A graph, the memory it reads and what it writes."""

    graph: Graph
    memory: _Memory
    scores: torch.Tensor | None  # [rows, >= vocab]: of all recordings; None: another rank chooses
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
    """The graphs of one model's steps with prompts, on one device."""

    forward: DecodeForward
    attention: CapturableAttention
    capture: Capture
    device: torch.device
    ends: Ends
    seconds: Callable[[Graph], float]  # that a replay takes on the device
    adapters: RecordedAdapters | None = None
    images: PagedImages | None = None  # where layers attend to some
    _recorded: dict[StepKind, dict[MixedSize, _Recording]] = field(default_factory=dict)
    _staging: Staging = field(init=False)

    def __post_init__(self) -> None:
        self._staging = Staging(self.device)

    def forget(self) -> None:
        """Drop every recording: each holds on to the cache it was made over."""
        self._recorded.clear()

    def record(
        self,
        cache: KVCache,
        width: int,
        sizes: Sequence[MixedSize],
        scores: torch.Tensor | None,
        pool: StatePool | None = None,
    ) -> None:
        """Record those of `sizes`, the largest first, that pay, for tables of `width` blocks.

        `scores` [rows, >= vocab] outlive a replay, and whoever has them replays one at a time;
        None: another rank's device chooses. `pool`: where the model keeps states.

        Where one cannot be recorded none is, and all such steps are launched.
        """
        memories = {size: self._reserve(size, width, pool) for size in sizes}
        try:
            for kind, own in self._sizes_by_kind(sizes).items():
                self._recorded[kind] = self._record_kind(kind, own, memories, cache, scores)
        except CaptureError as error:
            self.forget()
            print(
                "steps with prompts are launched kernel by kernel, "
                f"as none could be recorded: {error}",
                file=sys.stderr,
                flush=True,
            )

    def _record_kind(
        self,
        kind: StepKind,
        sizes: Sequence[MixedSize],
        memories: Mapping[MixedSize, _Memory],
        cache: KVCache,
        scores: torch.Tensor | None,
    ) -> dict[MixedSize, _Recording]:
        """Record those steps of a kind that pay. Raises CaptureError, on all ranks or on none."""
        found, lost = dict[MixedSize, _Recording](), 0
        for size in sizes:
            if size.tokens == lost:
                continue
            launching = _Launching()
            made = self._record(kind, memories[size], cache, scores, launching)
            first = all(size.tokens < other.tokens for other in found)
            if first and self._is_slower(made.graph, launching):
                lost = size.tokens
                del made  # what it takes is the next one's
            else:
                found[size] = made
        return found

    def _sizes_by_kind(self, sizes: Sequence[MixedSize]) -> dict[StepKind, Sequence[MixedSize]]:
        """Return which sizes are recorded of each kind of steps.

        With adapters, which most steps of a server do without, those that hold the most rows.
        """
        plain: dict[StepKind, Sequence[MixedSize]] = {StepKind(): sizes}
        if self.adapters is None:
            return plain
        return plain | {StepKind(adapted=True): widest_sizes(sizes)}

    def _is_slower(self, graph: Graph, launching: _Launching) -> bool:
        """Return whether a replay takes longer than to launch what it does.

        All ranks say the same: launched, a step takes what the slowest host takes.
        """
        return self._is_for_all(self.seconds(graph) > launching.seconds)

    def _is_for_all(self, said: bool) -> bool:
        """Return whether all ranks say so."""
        ranks = self.ends.tokens.ranks
        return said if ranks is None else bool(ranks.least(int(said), self.device))

    def launch(
        self, plan: StepPlan, lengths: Array | None, choosing: Choosing, *, masked: bool
    ) -> MixedStep | None:
        """Compute a step and choose its tokens, unless `masked`; None: no graph fits.

        `lengths` int64 [T] as for `Model.forward`, None for one that reads none.
        """
        places, sampler = chosen_places(plan), self.ends.sampler
        recording = self._find(plan, len(places))
        if recording is None or recording.scores is None or sampler is None:
            return None
        told: Told | None = None
        if not masked and len(choosing):
            told = sampler.ask(choosing, recording.memory.size.rows)
            if not sampler.fits(told):
                told = None
        hidden = self._run(recording, plan, lengths, places, told)
        if not len(choosing):
            return MixedStep(hidden, None)
        count, found = len(choosing), None
        if told is not None and recording.made.found is not None:
            found = recording.made.found.first(count, lists=told.widest > 0)
        chosen = Chosen(recording.scores[:count], found, recording.made.picked[:count])
        return MixedStep(hidden, chosen)

    def replay(self, plan: StepPlan, lengths: Array | None) -> torch.Tensor | None:
        """Return hidden states [T, features] of a step whose tokens another rank chooses.

        Valid until the next step; None: no graph fits, on no rank.
        """
        places = chosen_places(plan)
        recording = self._find(plan, len(places))
        return None if recording is None else self._run(recording, plan, lengths, places, None)

    def _find(self, plan: StepPlan, choices: int) -> _Recording | None:
        """Return the smallest graph that holds a plan which makes so many choices."""
        if not self._recorded or not is_recordable(plan):
            return None
        if self.images is not None and self.images.wants(plan):
            return None
        adapted = self.adapters is not None and self.adapters.used
        recorded = self._recorded[StepKind(adapted)]
        size = find_size(recorded, plan, choices)
        if size is None:
            return None
        found = recorded[size]
        if found.memory.rows is not None and not found.memory.rows.fits(plan):
            return None
        own, adapters = found.memory.adapters, self.adapters
        if adapters is not None and own is not None and adapters.used and not adapters.fits(own):
            return None
        return found

    def _run(
        self,
        recording: _Recording,
        plan: StepPlan,
        lengths: Array | None,
        places: NDArray[np.int64],
        told: Told | None,
    ) -> torch.Tensor:
        """Replay a graph with what it reads made that of `plan`; return its hidden states."""
        memory, sampler = recording.memory, self.ends.sampler
        arrays = token_arrays(plan, lengths, places)
        arrays += [] if memory.rows is None else state_arrays(plan)
        if memory.asked is not None:
            arrays += (told or memory.asked.idle).arrays
        arrays += self.attention.arrays(plan)
        self._staging.fill_from(memory.sheet, arrays)
        if sampler is not None and memory.asked is not None:
            sampler.refill_entries(memory.asked, told or memory.asked.idle)
        if self.adapters is not None and memory.adapters is not None and self.adapters.used:
            self.adapters.refill(memory.adapters)
        if memory.rows is not None:
            memory.rows.refill(plan)
        recording.graph.replay()
        return recording.hidden[: len(plan.token_ids)]

    def _reserve(self, size: MixedSize, width: int, pool: StatePool | None) -> _Memory:
        """Return what graphs of a size read, filled with idle tokens."""
        idle, adapters, sampler = idle_step(size, width), self.adapters, self.ends.sampler
        room = row_room(size)
        groups = [
            idle_arrays(size),
            [] if pool is None else idle_slots(room.rows),
            [] if sampler is None else sampler.ask_nothing(size.rows).arrays,
            self.attention.arrays(idle),
        ]
        every = [array for group in groups for array in group]
        told = torch.zeros(packed_size(every), dtype=torch.uint8, device=self.device)
        self._staging.fill(told, every)
        own, of_rows, of_choices, of_attention = cut(told, groups)
        slots = split(of_rows, groups[1])
        return _Memory(
            size,
            Sheet(every, told, shared=False),
            tokens=split(own, groups[0]),
            rows=None if pool is None else RecordedRows(room, slots, pool, self.device),
            attention=of_attention,
            asked=None if sampler is None else sampler.reserve(size.rows, of_choices),
            adapters=None if adapters is None else adapters.reserve(*size, decodes=False),
        )

    def _record(
        self,
        kind: StepKind,
        memory: _Memory,
        cache: KVCache,
        scores: torch.Tensor | None,
        launching: _Launching,
    ) -> _Recording:
        """Record a step of a kind over `memory`; `scores` as for `record`."""
        made, sampler = list[_Made](), self.ends.sampler
        own = None if scores is None else scores[: memory.size.rows]
        idle = idle_step(memory.size, 1)  # how wide tables are, the memory says
        ids, positions, lengths, inputs, places = memory.tokens

        def compute() -> torch.Tensor:
            known = self.ends.tokens.fill_in(ids, inputs)
            # Anew: its tiles are found by the first layer of every run.
            batch = self.attention.reserve(idle, cache, memory.attention, decodes=False)
            states = None if memory.rows is None else memory.rows.states
            hidden = self.forward(known, positions, lengths, self.attention, batch, states)
            picked = hidden.index_select(0, places)
            logits, found = self.ends.logits(picked), None
            if sampler is not None and memory.asked is not None:
                found = sampler.choose(logits, memory.asked.asked, hidden=picked, scores=own)
            made[:] = [_Made(picked, found)]
            return hidden

        with self._adapted(memory.adapters if kind.adapted else None):
            graph, hidden = self._capture(lambda: launching.measure(compute))
        return _Recording(graph, memory, own, hidden, made[0])

    def _capture(self, compute: Compute) -> tuple[Graph, torch.Tensor]:
        """Record work. Raises CaptureError on all ranks where one of them cannot."""
        made, why = None, "another rank could not record one"
        try:
            made = self.capture(compute)
        except CaptureError as error:
            why = str(error)
        if not self._is_for_all(made is not None) or made is None:
            raise CaptureError(why)
        return made

    def _adapted(self, reserved: ReservedTiles | None) -> AbstractContextManager[None]:
        """Have what is recorded inside compute adapters, if any are reserved for."""
        if self.adapters is None or reserved is None:
            return nullcontext()
        return self.adapters.recording(reserved)
