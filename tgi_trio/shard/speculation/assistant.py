"""Drafts of an assistant of Gemma 4, whose queries attend to the model's own keys and values.

It starts from the last known token and the hidden state that chose it, and continues from its own
drafts and states. It writes no keys and values, so all its drafts are made from one position, and
rows may come and go. See `AssistantSpec`. No torch in this file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.runner import DraftRow
from tgi_trio.shard.speculation.arithmetic import Rows
from tgi_trio.shard.speculation.drafter_plans import plan_rows
from tgi_trio.shard.speculation.hidden import LastStep
from tgi_trio.shard.speculation.record import judge_record, write_drafts
from tgi_trio.shard.speculation.sharing import share_room


class Assistant(Protocol):
    """An assistant's weights, the model's KV cache, and the backend's operations."""

    def draft(self, plan: StepPlan, states: Rows, count: int) -> NDArray[np.int64]:
        """Return `count` drafts [R, count] after the token of each of the plan's R rows.

        That token is not in the KV cache: a row's position is the last that is. `states` [R,
        features]: the model's hidden states there, before the final norm.
        """
        ...


class AssistantDrafter:
    """A drafter that drafts from hidden states and the model's KV cache."""

    def __init__(
        self, assistant: Assistant, last: LastStep, most: int, eos_ids: Iterable[int]
    ) -> None:
        """`last`: the runner's; `most`: tokens to draft at most, per step and sequence."""
        self._assistant = assistant
        self._last = last
        self._most = most
        self._eos_ids = frozenset(eos_ids)

    def draft_rows(self, rows: Sequence[DraftRow], spare: int) -> dict[int, int]:
        places = self._last.find_places(row.sequence for row in rows)
        ready = [row for row in rows if row.sequence.id in places]
        records = {row.sequence.id: judge_record(row.sequence, self._most) for row in ready}
        shared = share_room(ready, spare, allowed=lambda one: records[one.id].allowed)
        for record in records.values():
            if not record.allowed:
                record.rest -= 1
        if not shared:
            return {}
        sequences = [row.sequence for row, _ in shared]
        lengths = np.array([each.length for each in sequences], np.int64)
        tokens = np.array([each.token_ids[each.length - 1] for each in sequences], np.int64)
        plan = plan_rows(sequences, np.ones(len(shared), np.int64), lengths - 2, tokens)
        states = self._last.pick([places[each.id] for each in sequences])
        drafts = self._assistant.draft(plan, states, max(count for _, count in shared))
        counts = {}
        for (row, count), own in zip(shared, drafts.tolist(), strict=True):
            record = records[row.sequence.id]
            counts[row.place] = write_drafts(row.sequence, record, own, count, self._eos_ids)
        return {place: count for place, count in counts.items() if count}
