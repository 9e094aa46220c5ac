"""Steps with prompts recorded as CUDA graphs: prefill chunks beside decodes, choices included.

A recording has room for a number of tokens and a number of rows (`mixed_plans.py`); a step uses the
smallest one that holds it. A recording computes its padding too, and saves only the host's time for
launching. So a size is not recorded where a replay takes the device longer than the launches take
the host. Larger steps are launched kernel by kernel, as are steps with image tokens or with rows
that attend to images. Steps in which any row has an adapter have recordings of their own, one for
each number of tokens. Where layers move states by torch's operations, only small numbers of tokens
are recorded, with room for few rows of more than one token. Every rank records its part, of the
same sizes.

A replay computes the whole step, except for what is rarely asked for: a choice with masks, or with
more biases than there is room for, and log-probabilities of prompts are launched after it.
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
from tgi_trio.shard.torch_backend.layers.adapters.slotted_linear import ReservedTiles
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
from tgi_trio.shard.torch_backend.states.recorded_rows import (
    RecordedRows,
    idle_slots,
    row_staging,
)
from tgi_trio.shard.torch_backend.states.steps import state_arrays

if TYPE_CHECKING:  # it imports Triton
    from tgi_trio.shard.torch_backend.sampling.choice_settings import Choosing
    from tgi_trio.shard.torch_backend.sampling.device_sampler import (
        Found,
        HostInputs,
        Reserved,
    )


@dataclass(slots=True)
class _Memory:
    """What the recordings of a size read; it does not move."""

    size: MixedSize
    sheet: Sheet  # image on the host of the tokens, choices and attention: one copy uploads it
    tokens: list[torch.Tensor]  # views of the sheet's target, in `mixed_plans.token_arrays`' order
    rows: RecordedRows | None  # of layers with states
    attention: torch.Tensor  # uint8: the attention's part of the sheet's target
    reserved: Reserved | None  # the sampler's part
    adapters: ReservedTiles | None  # memory of the adapters


@dataclass(slots=True)
class _Made:
    """What a replay writes, besides hidden states."""

    picked: torch.Tensor  # [rows, features]: the hidden states from which tokens are chosen
    found: Found | None  # None: another rank chooses


@dataclass(slots=True)
class _Recording:
    """A graph, the memory it reads and the memory it writes."""

    graph: Graph
    memory: _Memory
    scores: torch.Tensor | None  # [rows, >= vocab], shared by all recordings; None: see `found`
    hidden: torch.Tensor  # [tokens, features]
    made: _Made


@dataclass(frozen=True, slots=True)
class MixedStep:
    """A step that has been launched; its tensors are valid until the next one is."""

    hidden: torch.Tensor  # [T, features]
    chosen: Chosen | None  # None: no row chooses; if its `found` is None, the choice is still due


@dataclass(slots=True)
class _Launching:
    """The least time that the host took to launch, kernel by kernel, what is recorded."""

    seconds: float = float("inf")

    def measure(self, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        began = time.perf_counter()
        out = run()
        self.seconds = min(self.seconds, time.perf_counter() - began)
        return out


@dataclass(slots=True)
class MixedGraphs:
    """The recorded steps with prompts of one model on one device."""

    forward: DecodeForward
    attention: CapturableAttention
    capture: Capture
    device: torch.device
    ends: Ends
    seconds: Callable[[Graph], float]  # of a replay on the device
    adapters: RecordedAdapters | None = None
    images: PagedImages | None = None  # given where layers attend to images
    _recorded: dict[StepKind, dict[MixedSize, _Recording]] = field(default_factory=dict)
    _staging: Staging = field(init=False)
    _row_staging: Staging = field(init=False)

    def __post_init__(self) -> None:
        self._staging = Staging(self.device)
        self._row_staging = row_staging(self.device)

    def forget(self) -> None:
        """Drop every recording, since each keeps the KV cache alive that it was captured with."""
        self._recorded.clear()

    def record(
        self,
        cache: KVCache,
        width: int,
        sizes: Sequence[MixedSize],
        scores: torch.Tensor | None,
        pool: StatePool | None = None,
    ) -> None:
        """Record those of `sizes` that pay, for block tables of `width` blocks a row.

        `sizes`: the largest first. `scores`: [rows, >= vocab], memory shared with the decode steps,
        of which one replays at a time; None: another rank chooses. `pool`: given where the model
        keeps states.

        If the capture of any step fails, none is recorded and all of them are launched.
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
        """Record a kind's steps that pay. Raises CaptureError, on all ranks or on none."""
        found, lost = dict[MixedSize, _Recording](), 0
        for size in sizes:
            if size.tokens == lost:
                continue
            launching = _Launching()
            made = self._record(kind, memories[size], cache, scores, launching)
            first = all(size.tokens < other.tokens for other in found)
            if first and self._is_slower(made.graph, launching):
                lost = size.tokens
                del made  # its memory is free for the next one
            else:
                found[size] = made
        return found

    def _sizes_by_kind(self, sizes: Sequence[MixedSize]) -> dict[StepKind, Sequence[MixedSize]]:
        """Return the sizes to record, by kind of step.

        Most steps have no adapters, so with them only the sizes with the most rows are recorded.
        """
        plain: dict[StepKind, Sequence[MixedSize]] = {StepKind(): sizes}
        if self.adapters is None:
            return plain
        return plain | {StepKind(adapted=True): widest_sizes(sizes)}

    def _is_slower(self, graph: Graph, launching: _Launching) -> bool:
        """Return whether a replay takes longer than launching the same kernels.

        True only where it does so on all ranks: a launched step is as slow as the slowest host.
        """
        return self._is_for_all(self.seconds(graph) > launching.seconds)

    def _is_for_all(self, said: bool) -> bool:
        """Return whether `said` is true on all ranks."""
        ranks = self.ends.tokens.ranks
        return said if ranks is None else bool(ranks.least(int(said), self.device))

    def launch(
        self, plan: StepPlan, lengths: Array | None, choosing: Choosing, *, masked: bool
    ) -> MixedStep | None:
        """Replay a step and, unless `masked`, choose its tokens; None if no recording fits.

        `lengths`: int64 [T] as for `Model.forward`; None for a model that does not read them.
        """
        places, sampler = chosen_places(plan), self.ends.sampler
        recording = self._find(plan, len(places))
        if recording is None or recording.scores is None or sampler is None:
            return None
        host_inputs: HostInputs | None = None
        if not masked and len(choosing):
            host_inputs = sampler.make_inputs(choosing, recording.memory.size.rows)
            if not sampler.fits(host_inputs):
                host_inputs = None
        hidden = self._run(recording, plan, lengths, places, host_inputs)
        if not len(choosing):
            return MixedStep(hidden, None)
        count, found = len(choosing), None
        if host_inputs is not None and recording.made.found is not None:
            found = recording.made.found.first(count, lists=host_inputs.widest > 0)
        chosen = Chosen(recording.scores[:count], found, recording.made.picked[:count])
        return MixedStep(hidden, chosen)

    def replay(self, plan: StepPlan, lengths: Array | None) -> torch.Tensor | None:
        """Return hidden states [T, features] of a step whose tokens another rank chooses.

        Valid until the next step. None if no recording fits, which is so on all ranks or on none.
        """
        places = chosen_places(plan)
        recording = self._find(plan, len(places))
        return None if recording is None else self._run(recording, plan, lengths, places, None)

    def _find(self, plan: StepPlan, choices: int) -> _Recording | None:
        """Return the smallest recording that holds a plan with so many choices."""
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
        host_inputs: HostInputs | None,
    ) -> torch.Tensor:
        """Copy a plan's inputs to where the graph reads them, and replay; return hidden states."""
        memory, sampler = recording.memory, self.ends.sampler
        arrays = token_arrays(plan, lengths, places)
        arrays += [] if memory.rows is None else state_arrays(plan)
        if memory.reserved is not None:
            arrays += (host_inputs or memory.reserved.idle).arrays
        arrays += self.attention.arrays(plan)
        self._staging.fill_from(memory.sheet, arrays)
        if sampler is not None and memory.reserved is not None:
            sampler.refill_entries(memory.reserved, host_inputs or memory.reserved.idle)
        if self.adapters is not None and memory.adapters is not None and self.adapters.used:
            self.adapters.refill(memory.adapters)
        if memory.rows is not None:
            memory.rows.refill(plan)
        recording.graph.replay()
        return recording.hidden[: len(plan.token_ids)]

    def _reserve(self, size: MixedSize, width: int, pool: StatePool | None) -> _Memory:
        """Reserve what the graphs of a size read, filled with idle tokens."""
        idle, adapters, sampler = idle_step(size, width), self.adapters, self.ends.sampler
        in_turns = pool is not None and pool.in_turns
        room, sending = row_room(size, in_turns=in_turns), self._row_staging
        groups = [
            idle_arrays(size),
            [] if pool is None else idle_slots(room.rows),
            [] if sampler is None else sampler.ask_nothing(size.rows).arrays,
            self.attention.arrays(idle),
        ]
        every = [array for group in groups for array in group]
        memory = torch.zeros(packed_size(every), dtype=torch.uint8, device=self.device)
        self._staging.fill(memory, every)
        own, of_rows, of_choices, of_attention = cut(memory, groups)
        slots = split(of_rows, groups[1])
        return _Memory(
            size,
            Sheet(every, memory, shared=False),
            tokens=split(own, groups[0]),
            rows=None if pool is None else RecordedRows(room, slots, pool, self.device, sending),
            attention=of_attention,
            reserved=None if sampler is None else sampler.reserve(size.rows, of_choices),
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
        """Record a step of a kind that reads `memory`; `scores` as for `record`."""
        made, sampler = list[_Made](), self.ends.sampler
        own = None if scores is None else scores[: memory.size.rows]
        idle = idle_step(memory.size, 1)  # any width: the graph reads the width from memory
        ids, positions, lengths, inputs, places = memory.tokens

        def compute() -> torch.Tensor:
            known = self.ends.tokens.fill_in(ids, inputs)
            # A new batch for every run: the first layer of a run computes its tiles and keeps them.
            batch = self.attention.reserve(idle, cache, memory.attention, decodes=False)
            states = None if memory.rows is None else memory.rows.states
            hidden = self.forward(known, positions, lengths, self.attention, batch, states)
            picked = hidden.index_select(0, places)
            logits, found = self.ends.logits(picked), None
            if sampler is not None and memory.reserved is not None:
                found = sampler.choose(
                    logits, memory.reserved.device_inputs, hidden=picked, scores=own
                )
            made[:] = [_Made(picked, found)]
            return hidden

        with self._adapted(memory.adapters if kind.adapted else None):
            graph, hidden = self._capture(lambda: launching.measure(compute))
        return _Recording(graph, memory, own, hidden, made[0])

    def _capture(self, compute: Compute) -> tuple[Graph, torch.Tensor]:
        """Capture work. Raises CaptureError on all ranks if it fails on any of them."""
        made, why = None, "another rank could not record one"
        try:
            made = self.capture(compute)
        except CaptureError as error:
            why = str(error)
        if not self._is_for_all(made is not None) or made is None:
            raise CaptureError(why)
        return made

    def _adapted(self, reserved: ReservedTiles | None) -> AbstractContextManager[None]:
        """Return a context in which steps are captured with adapters; None: without."""
        if self.adapters is None or reserved is None:
            return nullcontext()
        return self.adapters.recording(reserved)
