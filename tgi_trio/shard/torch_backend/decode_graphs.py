"""Steps of decodes as recorded graphs: one replay in place of a launch per kernel.

A graph is recorded per batch size of `sizes`; a step takes the smallest that holds its rows, and
the places left over decode nothing: token 0 at position 0, its K and V in the null block. What a
step changes is copied into tensors that stay where they are, the only ones a graph reads.
A step with a prefill chunk or guesses has another shape each time and is computed without graphs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.torch_backend.attention.interface import CapturableAttention
from tgi_trio.shard.torch_backend.kv_cache import BLOCK_SIZE, NULL_BLOCK, KVCache


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


@dataclass(slots=True)
class _Recorded:
    """A graph and the tensors it reads and writes."""

    graph: Graph
    token_ids: torch.Tensor  # int64 [size]
    positions: torch.Tensor  # int64 [size]
    lengths: torch.Tensor  # int64 [size]
    batch: Any  # the attention's own
    hidden: torch.Tensor  # [size, hidden]


class DecodeGraphs:
    """The graphs of one model on one device."""

    def __init__(
        self,
        forward: DecodeForward,
        attention: CapturableAttention,
        capture: Capture,
        sizes: Sequence[int],
        device: torch.device,
    ) -> None:
        """`sizes`: batch sizes to record, in any order; none: `forward` always returns None."""
        self._compute = forward
        self._attention = attention
        self._capture = capture
        self._device = device
        self.sizes = sorted(set(sizes))
        self._width = 0  # of the block tables they were recorded with
        self._recorded: dict[int, _Recorded] = {}

    def record(self, cache: KVCache, width: int) -> None:
        """Record every size over `cache`, for block tables of up to `width` blocks.

        The largest goes first: the smaller ones then live in its memory.
        """
        self._width = width
        self._recorded = {size: self._record(size, cache, width) for size in reversed(self.sizes)}

    def forward(self, plan: StepPlan, lengths: np.ndarray[Any, Any]) -> torch.Tensor | None:
        """Return hidden states [T, hidden], valid until the next call; None: no graph fits.

        `lengths` int64 [T] as for `Model.forward`.
        """
        rows = len(plan.token_ids)
        place = bisect_left(self.sizes, rows)
        fits = place < len(self.sizes) and plan.block_tables.shape[1] <= self._width
        if not (self._recorded and fits and only_decodes(plan)):
            return None
        recorded = self._recorded[self.sizes[place]]
        step = pad_plan(plan, self.sizes[place])
        recorded.token_ids.copy_(torch.from_numpy(step.token_ids))
        recorded.positions.copy_(torch.from_numpy(step.positions))
        recorded.lengths[:rows].copy_(torch.from_numpy(lengths))
        self._attention.refill(recorded.batch, step)
        recorded.graph.replay()
        return recorded.hidden[:rows]

    def _record(self, size: int, cache: KVCache, width: int) -> _Recorded:
        plan = idle_plan(size, width)
        token_ids = torch.from_numpy(plan.token_ids).to(self._device)
        positions = torch.from_numpy(plan.positions).to(self._device)
        lengths = torch.ones_like(positions)
        batch = self._attention.prepare(plan, cache)
        graph, hidden = self._capture(
            lambda: self._compute(token_ids, positions, lengths, self._attention, batch)
        )
        return _Recorded(graph, token_ids, positions, lengths, batch, hidden)
