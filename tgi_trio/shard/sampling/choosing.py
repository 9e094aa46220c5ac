"""Verification of speculative decoding: compares each draft with the sampler's own choice.

A draft is right if the sampler chooses the same token at its position, with the usual penalties,
grammar, seed and position. So the tokens are those of decoding one by one, sampled ones included,
and a wrong draft costs only its place in the step.
"""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import replace
from itertools import accumulate, takewhile
from operator import eq

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.contract import (
    Choices,
    RowResult,
    ShardSequence,
    StepPlan,
)
from tgi_trio.shard.sampling.base import AHEAD, RowSampler
from tgi_trio.shard.sampling.logits_processors import Scores, like_scores


def choice_positions(plan: StepPlan, rows: NDArray[np.intp]) -> NDArray[np.int64]:
    """Return the places in the plan's flat token list whose logits `choose_tokens` needs.

    Per row the last known token, then its drafts: int64 [rows + their drafts].
    """
    if len(rows) == 1 and plan.drafts is not None:
        end, drafts = int(plan.query_starts[rows[0] + 1]), int(plan.drafts[rows[0]])
        return np.arange(end - 1 - drafts, end)
    ends: NDArray[np.int64] = plan.query_starts[1:][rows].astype(np.int64)
    places: NDArray[np.int64] = ends - 1
    if plan.drafts is not None:
        counts = 1 + plan.drafts[rows].astype(np.int64)
        before = np.cumsum(counts) - counts
        places = np.arange(counts.sum()) + np.repeat(ends - counts - before, counts)
    return places


def choose_tokens(
    sampler: RowSampler, logits: Scores, plan: StepPlan, rows: NDArray[np.intp]
) -> Choices:
    """Return the tokens of `rows`: one each, and one more for every draft that was right.

    `logits` [choices, vocab] of the tokens at `choice_positions`; may be overwritten.
    """
    sequences = [plan.rows[i] for i in rows.tolist()]
    if plan.drafts is None:
        return sampler.choose(logits, sequences)
    drafts = plan.drafts[rows].tolist()
    starts = list(accumulate((1 + n for n in drafts), initial=0))

    def choose(some: ListLike[tuple[int, int]]) -> Choices:
        """Choose after the first `ahead` drafts of sequences, for some pairs (sequence, ahead)."""
        own = logits
        if len(some) < len(logits):
            own = logits[like_scores(logits, np.array([starts[i] + ahead for i, ahead in some]))]
        return sampler.choose(own, [_row_ahead(sequences[i], ahead) for i, ahead in some])

    # In one call, as far as choices do not depend on state that earlier ones update.
    places = [
        (i, ahead)
        for i, count in enumerate(drafts)
        for ahead in range(1 + count if _leaves_nothing(sequences[i]) else 1)
    ]
    choices = choose(places)
    if len(choices.token_ids) == len(logits) and choices.tops is None:
        return _keep_right(choices, sequences, drafts)
    found = dict(zip(places, choices.rows, strict=True))
    results, ahead = [found[i, 0] for i in range(len(sequences))], 0
    going = list(range(len(sequences)))
    while True:
        ahead += 1
        going = [i for i in going if _are_right(results[i], sequences[i], ahead, drafts[i])]
        if not going:
            return Choices.of(results)
        missing = [(i, ahead) for i in going if (i, ahead) not in found]
        if missing:
            found |= zip(missing, choose(missing).rows, strict=True)
        for i in going:
            more = found[i, ahead]
            if more.fault is None:  # otherwise the fault occurs again in the next step
                results[i] = _join_results(results[i], more)


def _keep_right(choices: Choices, sequences: list[ShardSequence], drafts: list[int]) -> Choices:
    """From the choices after every draft, one each, return only those after right drafts."""
    ids, first = choices.token_ids.tolist(), 0
    counts: list[int] = []
    kept: list[int] = []
    for sequence, count in zip(sequences, drafts, strict=True):
        tokens = sequence.token_ids[sequence.length : sequence.length + count].tolist()
        right = sum(takewhile(bool, map(eq, ids[first : first + count], tokens)))
        counts.append(1 + right)
        kept += range(first, first + 1 + right)
        first += 1 + count
    own = kept if len(counts) > 1 else slice(counts[0])
    return Choices(np.array(counts, np.int64), choices.token_ids[own], choices.logprobs[own])


def _leaves_nothing(sequence: ShardSequence) -> bool:
    """Return whether choices need no state: neither token counts nor a grammar's matcher."""
    sampling = sequence.sampling
    penalties = (sampling.frequency_penalty, sampling.presence_penalty)
    return not (sampling.grammar or any(penalties) or sampling.repetition_penalty != 1.0)


def _are_right(result: RowResult, sequence: ShardSequence, ahead: int, drafts: int) -> bool:
    """Return whether all of the first `ahead` drafts exist and are right."""
    if ahead > drafts or len(result.token_ids) < ahead:
        return False
    return result.token_ids[-1] == int(sequence.token_ids[sequence.length + ahead - 1])


def _row_ahead(sequence: ShardSequence, ahead: int) -> ShardSequence:
    """Return `extend_by_drafts`, always the same object, since samplers keep rows' settings."""
    if ahead == 0:
        return sequence
    kept = sequence.state.get(AHEAD)
    if not isinstance(kept, list):
        kept = sequence.state[AHEAD] = []
    while len(kept) < ahead:
        kept.append(extend_by_drafts(sequence, 1 + len(kept)))
    row: ShardSequence = kept[ahead - 1]
    row.token_ids, row.length = sequence.token_ids, sequence.length + ahead
    row.remaining = sequence.remaining - ahead
    row.min_remaining = max(0, sequence.min_remaining - ahead)
    return row


def extend_by_drafts(sequence: ShardSequence, ahead: int) -> ShardSequence:
    """Return the sequence as if `ahead` drafts were known tokens; the state is shared."""
    if ahead == 0:
        return sequence
    return replace(
        sequence,
        length=sequence.length + ahead,
        remaining=sequence.remaining - ahead,
        min_remaining=max(0, sequence.min_remaining - ahead),
    )


def _join_results(first: RowResult, more: RowResult) -> RowResult:
    return RowResult(
        token_ids=(*first.token_ids, *more.token_ids),
        logprobs=(*first.logprobs, *more.logprobs),
        tops=(*first.tops, *more.tops),
        prompt_logprobs=first.prompt_logprobs,
        prompt_tops=first.prompt_tops,
    )
