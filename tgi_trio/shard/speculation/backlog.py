"""Hidden states that a drafter with its own KV cache has not read yet.

Such a drafter reads every token of every sequence once. A step without drafts only adds a copy of
its states here; they are read together before the next drafts, or if there are too many. No torch
in this file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.contract import (
    Choices,
    ShardSequence,
    StepPlan,
)
from tgi_trio.shard.speculation.drafter_plans import plan_rows
from tgi_trio.shard.speculation.hidden import Pick

MOST: Final = 512  # limit of tokens to collect, without those of the last step


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """The N tokens of one step that are kept."""

    rows: list[ShardSequence]
    row_of: NDArray[np.int64]  # [N]
    positions: NDArray[np.int64]  # [N]
    following: NDArray[np.int64]  # [N] the token after each
    states: Any  # [N, features]


class Backlog:
    """The states that a drafter has not read yet."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Drop all states, if the KV blocks for them no longer exist."""
        self._steps: list[_Step] = []
        self._reached: dict[int, int] = {}  # sequence -> its last position in the backlog
        self.size = 0  # tokens
        self.due = False  # whether the backlog must be read before more is kept

    def keep(self, plan: StepPlan, sampled: NDArray[np.intp], choices: Choices, pick: Pick) -> None:
        """Keep a step's states, except those of wrong drafts; `choices` are for rows `sampled`.

        `pick`: returns a copy of the states [n, features] at places of the plan's tokens.
        """
        rows = len(plan.rows)
        if plan.drafts is None and len(choices.token_ids) == len(plan.token_ids) == rows:
            self._add(plan, np.arange(rows), np.arange(rows), choices.token_ids, pick)
            return
        counts = np.diff(plan.query_starts).astype(np.int64)
        kept = counts.copy()
        if plan.drafts is not None:
            kept -= plan.drafts
        kept[sampled] = np.where(choices.counts > 0, kept[sampled] + choices.counts - 1, 0)
        row_of = np.repeat(np.arange(len(counts)), counts)
        firsts = plan.query_starts[:-1].astype(np.int64)
        places = np.flatnonzero(np.arange(len(row_of)) - firsts[row_of] < kept[row_of])
        if not len(places):
            return
        following = np.append(plan.token_ids[1:], 0)
        chosen = np.cumsum(choices.counts) - 1  # each row's last token
        some = choices.counts > 0
        following[(firsts + kept - 1)[sampled[some]]] = choices.token_ids[chosen[some]]
        for row in np.flatnonzero(~_marks(sampled, len(counts))).tolist():  # cut prompts
            last = int(firsts[row] + counts[row]) - 1
            following[last] = plan.rows[row].token_ids[int(plan.positions[last]) + 1]
        self._add(plan, row_of[places], places, following[places], pick)

    def _add(
        self,
        plan: StepPlan,
        row_of: NDArray[np.int64],
        places: NDArray[np.int64],
        following: NDArray[np.int64],
        pick: Pick,
    ) -> None:
        """Keep the tokens at `places` [N], ascending, each with its row and the next token."""
        positions = plan.positions[places]
        self._steps.append(_Step(plan.rows, row_of, positions, following, pick(places)))
        self.size += len(places)
        lasts = np.flatnonzero(np.append(np.diff(row_of), 1))
        owners = (plan.rows[row].id for row in row_of[lasts].tolist())
        self._reached.update(zip(owners, positions[lasts].tolist(), strict=True))

    def reaches(self, sequence: ShardSequence) -> bool:
        """Return whether the state that chose the sequence's last known token is in the backlog."""
        return self._reached.get(sequence.id) == sequence.length - 2

    def drop(self, sequence: ShardSequence) -> None:
        """Note that a sequence has ended: its blocks may be reused after the next step."""
        if sequence.id in self._reached:
            self.due = True

    def take(self, join: Any, pick: Any) -> tuple[StepPlan, Any]:
        """Return the backlog as a plan, with its states [T, features], and clear it.

        The plan's tokens are those after its positions. `join`: concatenates states; `pick`:
        returns some of them, given their places [n].
        """
        steps = self._steps
        self.clear()
        by_id = {row.id: row for step in steps for row in step.rows}
        ids = np.concatenate([np.array([row.id for row in s.rows])[s.row_of] for s in steps])
        positions = np.concatenate([step.positions for step in steps])
        order = np.lexsort((positions, ids))
        again = np.zeros(len(order), np.bool_)  # computed again later: the last one counts
        again[:-1] = (np.diff(ids[order]) == 0) & (np.diff(positions[order]) == 0)
        order = order[~again]
        following = np.concatenate([step.following for step in steps])[order]
        places, counts = np.unique(ids[order], return_counts=True)
        plan = plan_rows([by_id[i] for i in places.tolist()], counts, positions[order], following)
        states = join([step.states for step in steps])
        return plan, states if len(order) == len(ids) and _rising(order) else pick(states, order)


def _marks(places: NDArray[np.intp], count: int) -> NDArray[np.bool_]:
    found = np.zeros(count, np.bool_)
    found[places] = True
    return found


def _rising(order: NDArray[np.intp]) -> bool:
    return bool((np.diff(order) == 1).all())
