"""Functions on plans: slicing, filling in tokens, removing drafts, and queries."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.contract import StepPlan


def slice_plan(plan: StepPlan, start: int, stop: int) -> StepPlan:
    """Return a plan of the rows `start` to `stop` of a plan; its arrays are views."""
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
        prefills=None if plan.prefills is None else plan.prefills[start:stop],
        inputs=None if plan.inputs is None else plan.inputs[first:last],
        features=None if plan.features is None else plan.features.between(first, last),
        rotary_positions=(
            None if plan.rotary_positions is None else plan.rotary_positions[:, first:last]
        ),
        visible=None if plan.visible is None else plan.visible[first:last],
        state_reads=None if plan.state_reads is None else plan.state_reads[start:stop],
        state_writes=None if plan.state_writes is None else plan.state_writes[start:stop],
    )


def fill_inputs(plan: StepPlan) -> None:
    """Fill in the tokens that the previous step has chosen, once that has been settled."""
    if plan.inputs is None:
        return
    if plan.drafts is not None:
        _leave_out_drafts(plan)  # only the runner knew them
    plan.token_ids = plan.token_ids.copy()  # other plans may share the array
    for i in np.flatnonzero(plan.inputs >= 0).tolist():
        row = plan.rows[int(np.searchsorted(plan.query_starts, i, side="right")) - 1]
        at = int(plan.positions[i])
        plan.token_ids[i] = row.token_ids[at] if at < row.length else 0  # 0: the row failed there
    plan.inputs = None


def _leave_out_drafts(plan: StepPlan) -> None:
    """Reduce a plan of decodes to the rows' last known tokens."""
    kept = plan.query_starts[:-1]
    plan.token_ids, plan.positions = plan.token_ids[kept], plan.positions[kept]
    plan.kv_slots = plan.kv_slots[kept]
    plan.inputs = None if plan.inputs is None else plan.inputs[kept]
    plan.context_lengths = (plan.positions + 1).astype(np.int32)
    plan.query_starts = np.arange(len(kept) + 1, dtype=np.int32)
    plan.drafts = None


def cut_plan(plan: StepPlan, firsts: NDArray[np.int64], ends: NDArray[np.int64]) -> StepPlan:
    """Return a plan without drafts of each row's query tokens `firsts[i]` up to `ends[i]`.

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
        prefills=plan.prefills,
        features=None if plan.features is None else plan.features.kept(kept),
        rotary_positions=(
            None if plan.rotary_positions is None else plan.rotary_positions[:, kept]
        ),
        visible=None if plan.visible is None else plan.visible[kept],
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


def prompt_spans(plan: StepPlan) -> dict[int, tuple[int, int]]:
    """Return `prompt_span` of the rows that have one, by row; looks at prefills alone."""
    rows = range(len(plan.rows)) if plan.prefills is None else np.flatnonzero(plan.prefills)
    spans = ((int(row), prompt_span(plan, int(row))) for row in rows)
    return {row: span for row, span in spans if span is not None}


def first_lengths(plan: StepPlan) -> NDArray[np.int64]:
    """Return [T] the length each token's sequence had when it was first computed."""
    prompts = np.array([row.prompt_length for row in plan.rows], dtype=np.int64)
    per_token: NDArray[np.int64] = np.repeat(prompts, np.diff(plan.query_starts))
    return np.maximum(per_token, plan.positions + 1)
