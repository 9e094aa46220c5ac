"""Steps of decodes as recorded graphs: one replay in place of a launch per kernel.

A graph is recorded per batch size of `sizes`; a step takes the smallest that holds its rows, and
the places left over decode nothing: token 0 at position 0, its K and V in the null block. What a
step changes is copied into memory that stays where it is, the only one a graph reads. Where tokens
are chosen on the device, that is recorded as well: the whole step is one launch.
Guesses are decodes, too: each reads the blocks of its sequence up to its own place. A step with a
prefill chunk has another shape each time and is computed without graphs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.torch_backend.attention.interface import CapturableAttention
from tgi_trio.shard.torch_backend.kv_cache import BLOCK_SIZE, NULL_BLOCK, KVCache
from tgi_trio.shard.torch_backend.sampling.choice_masks import Masks
from tgi_trio.shard.torch_backend.staging import Array, Staging, packed_size, split
from tgi_trio.shard.torch_backend.token_source import TokenSource

if TYPE_CHECKING:  # it imports Triton
    from tgi_trio.shard.torch_backend.sampling.device_sampler import (
        DeviceSampler,
        Reserved,
        ReservedMasks,
        Told,
    )


class Graph(Protocol):
    """Recorded work: reads and writes the tensors it was recorded with."""

    def replay(self) -> None: ...


Compute = Callable[[], torch.Tensor]
Capture = Callable[[Compute], tuple[Graph, torch.Tensor]]  # the tensor: what replays write


class DecodeForward(Protocol):
    """`Model.forward`, as far as decodes are concerned."""

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        lengths: torch.Tensor,
        attention: Any,
        batch: Any,
    ) -> torch.Tensor: ...


def only_decodes(plan: StepPlan) -> bool:
    """Return whether every row of the plan has one query token."""
    return len(plan.token_ids) == len(plan.context_lengths)


def as_decodes(plan: StepPlan) -> StepPlan | None:
    """Return the plan with a row for every query token, where these are decodes and their guesses.

    None for a plan with a prefill chunk. K and V of all tokens are written before any is read, so
    each sees those of its sequence up to itself. `rows` and `samples` stay as they are.
    """
    counts = np.diff(plan.query_starts)
    drafts = 0 if plan.drafts is None else plan.drafts
    if not plan.samples.all() or (counts != 1 + drafts).any():
        return None
    if plan.drafts is None:
        return plan
    return StepPlan(
        rows=plan.rows,
        token_ids=plan.token_ids,
        positions=plan.positions,
        kv_slots=plan.kv_slots,
        query_starts=np.arange(len(plan.token_ids) + 1, dtype=np.int32),
        context_lengths=(plan.positions + 1).astype(np.int32),
        block_tables=np.repeat(plan.block_tables, counts, axis=0),
        samples=plan.samples,
    )


def pad_plan(plan: StepPlan, size: int) -> StepPlan:
    """Return a plan of `size` decodes, those of `plan` first; `rows` and `samples` stay as is."""
    more = size - len(plan.token_ids)
    width = plan.block_tables.shape[1]
    tables = np.full((more, width), NULL_BLOCK, plan.block_tables.dtype)

    def filled(values: np.ndarray[Any, Any], value: int) -> np.ndarray[Any, Any]:
        return np.concatenate((values, np.full(more, value, values.dtype)))

    return StepPlan(
        rows=plan.rows,
        token_ids=filled(plan.token_ids, 0),
        positions=filled(plan.positions, 0),
        kv_slots=filled(plan.kv_slots, NULL_BLOCK * BLOCK_SIZE),
        query_starts=np.arange(size + 1, dtype=np.int32),
        context_lengths=filled(plan.context_lengths, 1),
        block_tables=np.concatenate((plan.block_tables, tables)),
        samples=plan.samples,
        inputs=plan.inputs,
    )


def idle_plan(size: int, width: int) -> StepPlan:
    """Return a plan of `size` decodes of nothing, with block tables of `width` blocks."""
    none = StepPlan(
        rows=[],
        token_ids=np.empty(0, np.int64),
        positions=np.empty(0, np.int64),
        kv_slots=np.empty(0, np.int64),
        query_starts=np.zeros(1, np.int32),
        context_lengths=np.empty(0, np.int32),
        block_tables=np.empty((0, width), np.int32),
        samples=np.empty(0, np.bool_),
    )
    return pad_plan(none, size)


def idle_chunks(rows: int) -> StepPlan:
    """Return a plan of `rows` prefills of nothing, of two tokens each."""
    plan = idle_plan(2 * rows, 1)
    return replace(
        plan,
        query_starts=plan.query_starts[::2],
        context_lengths=np.full(rows, 2, np.int32),
        positions=np.tile(np.arange(2), rows),
        kv_slots=np.tile(NULL_BLOCK * BLOCK_SIZE + np.arange(2), rows),
        block_tables=plan.block_tables[:rows],
    )


@dataclass(frozen=True, slots=True)
class Ends:
    """What a recorded step begins and ends with: tokens of the step before, logits, a choice."""

    tokens: TokenSource
    logits: Callable[[torch.Tensor], torch.Tensor]
    sampler: DeviceSampler | None = None  # None: another rank chooses


@dataclass(slots=True)
class Chosen:
    """What a step chose, on the device and valid until the next one."""

    scores: torch.Tensor  # float32 [R, vocab]; see `DeviceSampler.choose`
    found: torch.Tensor | None  # float64 [R, 3]; None: it has chosen nothing yet
    size: int = 0  # of the recording that has made the scores; 0: none has


@dataclass(slots=True)
class _Recorded:
    """A graph and the memory it reads and writes."""

    graph: Graph
    tokens: torch.Tensor  # uint8: token ids, positions, lengths, inputs
    batch: Any  # the attention's own
    asked: Reserved | None  # the sampler's own
    hidden: torch.Tensor  # [size, hidden]
    chosen: Chosen | None
    masked: _MaskedChoice | None


@dataclass(slots=True)
class _MaskedChoice:
    """A graph that chooses from the scores of another one, with masks."""

    graph: Graph
    masks: ReservedMasks
    found: torch.Tensor  # float64 [size, 3]


class DecodeGraphs:
    """The graphs of one model on one device."""

    def __init__(
        self,
        forward: DecodeForward,
        attention: CapturableAttention,
        capture: Capture,
        sizes: Sequence[int],
        device: torch.device,
        ends: Ends | None = None,
    ) -> None:
        """`sizes`: batch sizes to record, in any order; none: `forward` always returns None."""
        self._compute = forward
        self._attention = attention
        self._capture = capture
        self._device = device
        self._ends = ends
        self._sampler = None if ends is None else ends.sampler
        self._staging = Staging(device)
        self.sizes = sorted(set(sizes))
        self._usable: list[int] = []
        self._width = 0  # of the block tables they were recorded with
        self._recorded: dict[int, _Recorded] = {}
        self._scores: torch.Tensor | None = None  # float32 [largest, vocab]: of all graphs
        self._mask_memory: torch.Tensor | None = None  # uint8: of all graphs

    def forget(self) -> None:
        """Drop every recording: each holds on to the cache it was made over."""
        self._recorded, self._usable, self._scores, self._mask_memory = {}, [], None, None

    def record(self, cache: KVCache, width: int, most: int | None = None) -> None:
        """Record every size over `cache`, for block tables of up to `width` blocks.

        Steps have `most` rows; larger sizes than hold them are left out. The largest goes first:
        the smaller ones then live in its memory.
        """
        self.forget()
        self._width = width
        sizes = self.sizes if most is None else self.sizes[: 1 + bisect_left(self.sizes, most)]
        self._recorded = {size: self._record(size, cache, width) for size in reversed(sizes)}
        self._usable = sizes

    def forward(self, plan: StepPlan, lengths: Array) -> torch.Tensor | None:
        """Return hidden states [T, hidden], valid until the next call; None: no graph fits.

        `lengths` int64 [T] as for `Model.forward`.
        """
        recorded = self._find(plan)
        if recorded is None:
            return None
        self._refill(recorded, plan, lengths)
        recorded.graph.replay()
        return recorded.hidden[: len(plan.token_ids)]

    def replay(self, plan: StepPlan, lengths: Array) -> bool:
        """Compute a step of decodes whose tokens another rank chooses; False: no graph fits."""
        return self.forward(plan, lengths) is not None

    def choose(self, plan: StepPlan, lengths: Array, told: Told | None) -> Chosen | None:
        """Compute a step of decodes and choose all its rows' tokens; None: no graph fits.

        `told`: what `DeviceSampler.ask` returns for as many choices as `size_of` says; None:
        nothing is chosen, and the scores are as the model left them.
        """
        recorded, sampler = self._find(plan), self._sampler
        if recorded is None or sampler is None or recorded.asked is None or recorded.chosen is None:
            return None
        rows = len(plan.token_ids)
        self._refill(recorded, plan, lengths)
        sampler.refill(recorded.asked, told or recorded.asked.idle)
        recorded.graph.replay()
        found = recorded.chosen.found
        size = len(recorded.hidden)
        return Chosen(recorded.chosen.scores[:rows], None if found is None else found[:rows], size)

    def choose_masked(self, size: int, told: Told, masks: Masks) -> torch.Tensor:
        """Choose with masks from the scores of the last step, of the graph for `size` decodes.

        `told`: as for `choose`. Returns float64 [C, 3].
        """
        recorded, sampler = self._recorded[size], self._sampler
        if recorded.masked is None or recorded.asked is None or sampler is None:
            raise RuntimeError("tokens are not chosen where this is recorded")
        sampler.refill(recorded.asked, told)
        sampler.refill_masks(recorded.masked.masks, masks)
        recorded.masked.graph.replay()
        return recorded.masked.found[: len(masks.green)]

    def size_of(self, plan: StepPlan) -> int | None:
        """Return the decodes of the graph that a step would take; None: no graph fits."""
        recorded = self._find(plan)
        return None if recorded is None else len(recorded.hidden)

    def _find(self, plan: StepPlan) -> _Recorded | None:
        """Return the smallest graph that holds a step."""
        place = bisect_left(self._usable, len(plan.token_ids))
        fits = place < len(self._usable) and plan.block_tables.shape[1] <= self._width
        return self._recorded[self._usable[place]] if fits and only_decodes(plan) else None

    def _refill(self, recorded: _Recorded, plan: StepPlan, lengths: Array) -> None:
        """Make what a graph reads that of `plan`."""
        step = pad_plan(plan, len(recorded.hidden))
        self._staging.fill(recorded.tokens, _token_arrays(step, lengths))
        self._attention.refill(recorded.batch, step)

    def _record(self, size: int, cache: KVCache, width: int) -> _Recorded:
        plan = idle_plan(size, width)
        arrays = _token_arrays(plan, plan.context_lengths.astype(np.int64))
        tokens = torch.zeros(packed_size(arrays), dtype=torch.uint8, device=self._device)
        self._staging.fill(tokens, arrays)
        ids, positions, lengths, inputs = split(tokens, arrays)
        batch = self._attention.reserve(plan, cache)
        ends, sampler = self._ends, self._sampler
        asked = sampler.reserve(size) if sampler else None
        made: list[Chosen] = []

        def compute() -> torch.Tensor:
            known = ends.tokens.fill_in(ids, inputs) if ends else ids
            hidden = self._compute(known, positions, lengths, self._attention, batch)
            logits = ends.logits(hidden) if ends else None
            if sampler is not None and asked is not None and logits is not None:
                scores = self._own_scores(logits)
                made[:] = [Chosen(scores, sampler.choose(scores, asked.asked))]
            return hidden

        graph, hidden = self._capture(compute)
        chosen, masked = made[0] if made else None, None
        if chosen is not None and sampler is not None and asked is not None:
            masked = self._record_masked(chosen.scores, sampler, asked)
        return _Recorded(graph, tokens, batch, asked, hidden, chosen, masked)

    def _record_masked(
        self, scores: torch.Tensor, sampler: DeviceSampler, asked: Reserved
    ) -> _MaskedChoice:
        """Record a choice with masks from `scores`; all of them use the memory of the largest."""
        masks = sampler.reserve_masks(len(scores), self._mask_memory)
        self._mask_memory = masks.memory

        def compute() -> torch.Tensor:
            return sampler.choose(scores, asked.asked, masks.here)

        graph, found = self._capture(compute)
        return _MaskedChoice(graph, masks, found)

    def _own_scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Return `logits` in memory that all graphs share, and that outlives a replay."""
        if self._scores is None:  # the largest size comes first
            self._scores = torch.empty_like(logits)
        return self._scores[: len(logits)].copy_(logits)


def _token_arrays(plan: StepPlan, lengths: Array) -> list[Array]:
    """Return a plan's tokens as they are sent; `lengths` of the first of them."""
    count = len(plan.token_ids)
    inputs = np.full(count, -1, np.int32)
    if plan.inputs is not None:
        inputs[: len(plan.inputs)] = plan.inputs
    every = np.ones(count, np.int64)
    every[: len(lengths)] = lengths
    return [plan.token_ids, plan.positions, every, inputs]
