"""Recording decode steps: the memory that graphs read, and what they compute and choose."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.torch_backend.attention.interface import CapturableAttention
from tgi_trio.shard.torch_backend.kv_cache import KVCache
from tgi_trio.shard.torch_backend.recordings.carveouts import Carveouts
from tgi_trio.shard.torch_backend.recordings.decode_plans import (
    ALL_KNOWN,
    UNREAD,
    idle_plan,
    rotary_position,
)
from tgi_trio.shard.torch_backend.recordings.recorded_steps import (
    Capture,
    Chosen,
    Compute,
    DecodeForward,
    Ends,
    MaskedChoice,
    PagedImages,
    RecordedAdapters,
    RecordedStep,
    Recording,
    StepKind,
    StepMemory,
)
from tgi_trio.shard.torch_backend.staging import Array, Sheet, Staging, cut, packed_size, split
from tgi_trio.shard.torch_backend.states.pool import StatePool
from tgi_trio.shard.torch_backend.states.steps import StateSteps, StepStates, state_arrays
from tgi_trio.shard.torch_backend.step_features import StepFeatures

if TYPE_CHECKING:  # they import Triton
    from tgi_trio.shard.torch_backend.sampling.device_sampler import DeviceSampler, Found, Reserved


class StepRecorder:
    """Records the decode steps of one model on one device, and owns what recordings share."""

    def __init__(
        self,
        forward: DecodeForward,
        attention: CapturableAttention,
        capture: Capture,
        device: torch.device,
        ends: Ends | None,
        adapters: RecordedAdapters | None,
        images: PagedImages | None,
        carveouts: Carveouts | None,
    ) -> None:
        """As for `DecodeGraphs`."""
        self._carveouts = carveouts
        self._compute = forward
        self._attention = attention
        self._capture = capture
        self._device = device
        self._ends = ends
        self._sampler = None if ends is None else ends.sampler
        self._adapters = adapters
        self._images = images
        self._staging = Staging(device)
        self.pool: StatePool | None = None  # of the states that recorded steps read and write
        self.scores: torch.Tensor | None = None  # [largest, >= vocab], shared by all recordings
        self.hidden: torch.Tensor | None = None  # [largest, features], likewise, with drafters
        self._mask_memory: torch.Tensor | None = None  # uint8, likewise

    def forget(self) -> None:
        """Drop what the recordings share."""
        self.pool = self.scores = self.hidden = self._mask_memory = None

    def idle(self, size: int, cache: KVCache, width: int) -> Compute:
        """Return a function that runs an idle decode step of `size` rows, choices included.

        It returns logits, or hidden states on ranks that have no logits.
        """
        memory = self.reserve(size, cache, width)

        def compute() -> torch.Tensor:
            hidden, logits, _ = self._run(memory, None)
            return hidden if logits is None else logits

        return compute

    def token_arrays(self, plan: StepPlan, lengths: Array | None) -> list[Array]:
        """Return a plan's token arrays for upload, with the state slots if there are any."""
        inputs = ALL_KNOWN if plan.inputs is None else plan.inputs
        slots = [] if self.pool is None else state_arrays(plan)
        read = UNREAD if lengths is None else lengths
        return [plan.token_ids, rotary_position(plan), read, inputs, *slots]

    def record(self, size: int, cache: KVCache, width: int) -> Recording:
        """Record the steps of `size` decodes over `cache`, for tables of up to `width` blocks."""
        memory = self.reserve(size, cache, width)
        crossed = (False,) if memory.images is None else (False, True)
        kinds = [StepKind(crossed=each) for each in crossed]
        steps = {kind: self._record_step(memory, kind) for kind in kinds}
        plain, masked = steps[StepKind()], None
        if plain.chosen is not None and self._sampler is not None and memory.reserved is not None:
            masked = self._record_masked(plain.chosen.scores, self._sampler, memory.reserved)
        if self._adapters is not None and memory.adapters is not None:
            with self._adapters.recording(memory.adapters):
                for kind in (each._replace(adapted=True) for each in kinds):
                    steps[kind] = self._record_step(memory, kind)
        return Recording(memory, steps, masked)

    def reserve(self, size: int, cache: KVCache, width: int) -> StepMemory:
        """Reserve what the graphs of `size` decodes read, filled with idle rows."""
        plan, sampler, adapters = idle_plan(size, width), self._sampler, self._adapters
        plan.inputs = np.full(size, -1, np.int32)
        chain = None if self._ends is None else self._ends.chain
        tokens = self.token_arrays(plan, plan.context_lengths.astype(np.int64))
        unlinked = [] if chain is None else chain.pad([], size)
        for array in unlinked:
            array.flags.writeable = False
        groups = [
            tokens,
            unlinked,
            [] if sampler is None else sampler.ask_nothing(size).arrays,
            self._attention.arrays(plan),
        ]
        every = [array for group in groups for array in group]
        at = len(every) - len(groups[-1])
        host_inputs = torch.zeros(packed_size(every), dtype=torch.uint8, device=self._device)
        self._staging.fill(host_inputs, every)
        own, of_links, of_choices, of_attention = cut(host_inputs, groups)
        ids, positions, lengths, inputs, *slots = split(own, tokens)
        states: StepStates | None = None
        if self.pool is not None:
            reads, writes, fresh = slots
            steps = StateSteps(list(range(size + 1)), reads, writes, fresh)
            states = StepStates(self.pool.layers, steps)
        return StepMemory(
            size,
            Sheet(every, host_inputs, shared=False),
            ids,
            positions,
            lengths,
            inputs,
            states,
            batch=self._attention.reserve(plan, cache, of_attention),
            reserved=None if sampler is None else sampler.reserve(size, of_choices),
            links=None if chain is None else chain.reserve(size, of_links),
            unlinked=unlinked,
            moving=(0, 1, at, at + 1),
            adapters=None if adapters is None else adapters.reserve(size, size, decodes=True),
            images=None if self._images is None else self._images.reserve(size),
        )

    def _record_step(self, memory: StepMemory, kind: StepKind) -> RecordedStep:
        """Record a step of a kind that reads `memory`."""
        made = list[Chosen]()
        features: StepFeatures | None = None
        if memory.images is not None and kind.crossed:
            features = StepFeatures.recorded(memory.images.cross_tokens, self._device)

        def compute() -> torch.Tensor:
            hidden, _, chosen = self._run(memory, features)
            made[:] = [] if chosen is None else [chosen]
            return hidden

        if self._carveouts is None or kind != StepKind():  # carve-outs are measured for plain steps
            graph, hidden = self._capture(compute)
        else:
            graph, hidden = self._carveouts.record(memory.size, compute)
        return RecordedStep(graph, hidden, made[0] if made else None)

    def _run(
        self, memory: StepMemory, features: StepFeatures | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, Chosen | None]:
        """Run a step; return hidden states, and logits and choices where this rank makes them."""
        ends = self._ends
        known = ends.tokens.fill_in(memory.ids, memory.inputs) if ends else memory.ids
        hidden = self._compute(
            self._chain_tokens(known, memory),
            memory.positions,
            memory.lengths,
            self._attention,
            memory.batch,
            memory.states,
            features=features,
        )
        logits = ends.logits(hidden) if ends else None
        if self._sampler is None or memory.reserved is None or logits is None:
            return hidden, logits, None
        chosen = self._choose(self._sampler, memory, memory.reserved, logits, hidden, known)
        # The copy follows the choice: the choice's kernels begin early, which a copy before them
        # would not allow.
        return self._own_hidden(hidden), logits, chosen

    def _chain_tokens(self, known: torch.Tensor, memory: StepMemory) -> torch.Tensor:
        """Return the tokens to compute; the chain corrects those of rows that follow drafts."""
        chain = None if self._ends is None else self._ends.chain
        if chain is None or memory.links is None or memory.reserved is None:
            return known
        places, uniforms = (
            self._attention.places(memory.batch),
            memory.reserved.device_inputs.uniforms,
        )
        return chain.move(known, memory.positions, places, memory.links, uniforms)

    def _choose(
        self,
        sampler: DeviceSampler,
        memory: StepMemory,
        reserved: Reserved,
        logits: torch.Tensor,
        hidden: torch.Tensor,
        known: torch.Tensor,
    ) -> Chosen:
        """Choose a token for each row, and leave the scores for choices with masks."""
        chain = None if self._ends is None else self._ends.chain
        scores = self._own_scores(sampler, memory.size)
        found = sampler.choose(logits, reserved.device_inputs, hidden=hidden, scores=scores)
        if chain is not None and memory.links is not None:
            targets = reserved.device_inputs.targets
            found = chain.judge(found, known, memory.positions, targets, memory.links)
        return Chosen(scores, found, ids=known)

    def _record_masked(
        self, scores: torch.Tensor, sampler: DeviceSampler, reserved: Reserved
    ) -> MaskedChoice:
        """Record a choice from `scores` with masks, whose memory all sizes share."""
        # Inputs of its own, which no other step overwrites: they are sent only when they change.
        own = sampler.reserve(len(scores), entries=reserved.entries)
        masks = sampler.reserve_masks(len(scores), self._mask_memory)
        self._mask_memory = masks.memory
        made: list[Found] = []

        def compute() -> torch.Tensor:
            hidden = None if self.hidden is None else self.hidden[: len(scores)]
            made[:] = [sampler.choose(scores, own.device_inputs, masks.here, hidden, scores)]
            return made[0].tokens

        graph, _ = self._capture(compute)
        return MaskedChoice(graph, own, masks, made[0])

    def _own_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        """With drafting heads, copy hidden states to where choices with masks read them, too."""
        if self._sampler is None or self._sampler.drafting is None:
            return hidden
        if self.hidden is None or len(self.hidden) < len(hidden):  # the largest is recorded first
            self.hidden = torch.empty_like(hidden)
        return self.hidden[: len(hidden)].copy_(hidden)

    def _own_scores(self, sampler: DeviceSampler, size: int) -> torch.Tensor:
        """Return memory for scores that all graphs share; it outlives a replay."""
        if self.scores is None or len(self.scores) < size:  # the largest is recorded first
            self.scores = sampler.make_scores(size)
        return self.scores[:size]
