"""The step contract: what one forward step is given and what it answers.

Prefill chunks, decodes and speculated tokens are all the same thing here: a row with some query
tokens at given positions. Every backend (reference torch, CPU kernels, CUDA) takes a `StepPlan`
and returns a `StepResult`; the worker loop knows nothing else about it. No torch in this file.
"""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tgi_trio.ipc.messages import SamplingParameters

BLOCK_SIZE = 16  # tokens per KV block


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence as the shard holds it. Created by a PREFILL row, changed by the worker only."""

    id: int
    token_ids: NDArray[np.int32]  # buffer [capacity]; the first `length` entries are real
    length: int  # known tokens: prompt + generated
    prompt_length: int  # leading tokens that are the client's prompt (for penalties)
    computed: int  # tokens whose K and V are in the blocks
    block_ids: list[int]  # block table, in order; extended by EXTEND
    remaining: int  # tokens still to generate at most
    min_remaining: int  # tokens still to generate before EOS is allowed
    sampling: SamplingParameters
    state: dict[str, object] = field(default_factory=dict)  # backend's own (grammar matcher, ...)


@dataclass(slots=True)
class StepPlan:
    """One step: R rows, T query tokens in all, flat and without padding."""

    rows: list[Sequence]
    token_ids: NDArray[np.int64]  # [T]
    positions: NDArray[np.int64]  # [T] position of each token in its sequence
    kv_slots: NDArray[np.int64]  # [T] block_id * block_size + offset: where its K and V go
    query_starts: NDArray[np.int32]  # [R + 1] rows' first token in the flat list, cumulative
    context_lengths: NDArray[np.int32]  # [R] KV tokens a row sees, its own query included
    block_tables: NDArray[np.int32]  # [R, widest], unused entries 0
    samples: NDArray[np.bool_]  # [R] the row's last known token is in the step: choose the next
    # [R] how many of a row's last query tokens are guesses (they stand in its `token_ids` behind
    # the known ones); after each that proves right one more token is chosen. None: no row has any.
    drafts: NDArray[np.int32] | None = None


def slice_plan(plan: StepPlan, start: int, stop: int) -> StepPlan:
    """Return rows `start` to `stop` of a plan as a plan of their own; arrays are views."""
    first, last = int(plan.query_starts[start]), int(plan.query_starts[stop])
    return StepPlan(
        rows=plan.rows[start:stop],
        token_ids=plan.token_ids[first:last],
        positions=plan.positions[first:last],
        kv_slots=plan.kv_slots[first:last],
        query_starts=plan.query_starts[start : stop + 1] - plan.query_starts[start],
        context_lengths=plan.context_lengths[start:stop],
        block_tables=plan.block_tables[start:stop],
        samples=plan.samples[start:stop],
        drafts=None if plan.drafts is None else plan.drafts[start:stop],
    )


def cut_plan(plan: StepPlan, firsts: NDArray[np.int64], ends: NDArray[np.int64]) -> StepPlan:
    """Return a plan without guesses of each row's query tokens `firsts[i]` up to `ends[i]`.

    Every row keeps at least one; a row that does not keep its last samples nothing.
    """
    counts = np.diff(plan.query_starts)
    offsets = np.arange(len(plan.token_ids)) - np.repeat(plan.query_starts[:-1], counts)
    kept = (offsets >= np.repeat(firsts, counts)) & (offsets < np.repeat(ends, counts))
    return StepPlan(
        rows=plan.rows,
        token_ids=plan.token_ids[kept],
        positions=plan.positions[kept],
        kv_slots=plan.kv_slots[kept],
        query_starts=np.concatenate(([0], np.cumsum(ends - firsts))).astype(np.int32),
        context_lengths=(plan.context_lengths - (counts - ends)).astype(np.int32),
        block_tables=plan.block_tables,
        samples=plan.samples & (ends == counts),
    )


def prompt_span(plan: StepPlan, index: int) -> tuple[int, int] | None:
    """Return (first, end) of the positions of a row whose logits predict prompt tokens.

    None for a row that asked for no prompt log-probabilities or is past its prompt.
    """
    row = plan.rows[index]
    start, stop = int(plan.query_starts[index]), int(plan.query_starts[index + 1])
    first = int(plan.positions[start])
    if not row.sampling.prompt_logprobs or first >= row.prompt_length:
        return None
    return first, min(first + stop - start, row.prompt_length - 1)


@dataclass(slots=True)
class RowResult:
    """What one row got; rows that only prefilled get an empty one."""

    token_ids: ListLike[int] = ()
    logprobs: ListLike[float] = ()
    tops: ListLike[ListLike[tuple[int, float]]] = ()  # per token: (id, logprob), best first
    prompt_logprobs: ListLike[float] = ()  # for the prompt positions computed in this step
    prompt_tops: ListLike[ListLike[tuple[int, float]]] = ()  # of each, or none at all
    fault: str | None = None  # the row failed alone; the others are fine


@dataclass(slots=True)
class StepResult:
    """Answer to a plan: one RowResult per row, in the plan's order."""

    rows: list[RowResult]
    forward_ns: int
    sample_ns: int
    raised: bool = False  # before its rows were computed again; set by the worker


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Static facts of a loaded model (INFO_REPLY)."""

    vocab_size: int
    block_size: int
    layers: int
    kv_bytes_per_token: int
    max_positions: int  # 0 = unbounded
    eos_ids: tuple[int, ...]
    dtype: str
    device: str
    backend: str
    load_ns: int
    # False where a token's K and V depend on more than the tokens before it (rotary frequencies
    # that change with the length), or are not in the blocks at all (a cache of transformers' own).
    prefix_reuse: bool = True
    # Query tokens of a step up to which one more costs little: guesses (`StepPlan.drafts`) fill a
    # step so far and no farther. 0: its plans may have none.
    cheap_tokens: int = 0


@dataclass(frozen=True, slots=True)
class WarmupRequest:
    """What the KV cache must be sized for (WARMUP)."""

    max_prefill_tokens: int
    max_total_tokens: int
    max_batch_size: int
    max_batch_total_tokens: int  # 0 = as many as memory allows


@dataclass(frozen=True, slots=True)
class WarmupResult:
    """What the warm-up found (WARMUP_REPLY); bytes, nanoseconds."""

    blocks: int
    block_size: int
    weight_bytes: int
    activation_bytes: int
    kv_bytes: int
    spare_bytes: int
    warmup_ns: int


class Runner(Protocol):
    """A model that can step. `step` must leave sequences untouched: the worker moves them."""

    @property
    def info(self) -> ModelInfo: ...

    def warm_up(self, request: WarmupRequest) -> WarmupResult:
        """Run the largest step, size and allocate the KV cache."""
        ...

    def step(self, plan: StepPlan) -> StepResult:
        """Compute the plan's tokens, write their K and V, choose next tokens where asked."""
        ...

    def prepare(self, sequence: Sequence) -> bool:
        """Start what a sequence with a grammar needs before its first step; is it ready?

        Asked before every step until it is; the sequence sits them out.
        """
        ...

    def drop(self, sequence: Sequence) -> None:
        """Forget whatever is held for `sequence`."""
        ...
