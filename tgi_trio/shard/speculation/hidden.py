"""The hidden states that chose the last tokens: kept by runners, read by speculation heads.

They are kept until the next step and read only to draft, so a step without drafts costs no more.
No torch in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.contract import (
    Choices,
    ShardSequence,
    StepPlan,
)
from tgi_trio.shard.sampling.choosing import choice_positions

Pick = Callable[[NDArray[np.int64]], Any]


class LastStep:
    """A runner's last step, as drafters need it."""

    def __init__(self) -> None:
        self._kept: tuple[StepPlan, NDArray[np.intp], Choices, Pick] | None = None

    def keep(self, plan: StepPlan, sampled: NDArray[np.intp], choices: Choices, pick: Pick) -> None:
        """Keep a step: `choices` of its rows `sampled`.

        `pick`: returns a copy of the hidden states [n, features], before the final norm, at places
        of the plan's flat list of tokens; called before the next step.
        """
        self._kept = plan, sampled, choices, pick

    def keep_drafts(
        self, plan: StepPlan, sampled: NDArray[np.intp], choices: Choices, drafts: NDArray[Any]
    ) -> None:
        """Keep a step of a runner that has already drafted: int64 [C, heads] after every choice.

        They replace the hidden states: see `HeadsDrafter`.
        """
        firsts = choice_positions(plan, sampled)
        self.keep(plan, sampled, choices, lambda places: drafts[np.searchsorted(firsts, places)])

    def find_places(self, sequences: Iterable[ShardSequence]) -> dict[int, int]:
        """Return the places, by id, where sequences' last tokens were chosen, if in the step."""
        if self._kept is None:
            return {}
        plan, sampled, choices, _ = self._kept
        if len(sampled) == 1:
            return self._find_one(sequences)
        drafts = 0 if plan.drafts is None else plan.drafts[sampled]
        firsts = plan.query_starts[1:][sampled].astype(np.int64) - 1 - drafts
        lengths = (plan.positions[firsts] + 1 + choices.counts).tolist()
        places = (firsts + choices.counts - 1).tolist()
        held = {
            plan.rows[row].id: (length, place)
            for row, length, place, count in zip(
                sampled.tolist(), lengths, places, choices.counts.tolist(), strict=True
            )
            if count
        }
        found = ((sequence, held.get(sequence.id)) for sequence in sequences)
        return {
            sequence.id: own[1]
            for sequence, own in found
            if own is not None and own[0] == sequence.length
        }

    def _find_one(self, sequences: Iterable[ShardSequence]) -> dict[int, int]:
        """Return the same for a step in which only one row was sampled."""
        if self._kept is None:
            return {}
        plan, sampled, choices, _ = self._kept
        row, count = int(sampled[0]), int(choices.counts[0])
        drafts = 0 if plan.drafts is None else int(plan.drafts[row])
        first, owner = int(plan.query_starts[row + 1]) - 1 - drafts, plan.rows[row].id
        length = int(plan.positions[first]) + 1 + count
        if not count or all((one.id, one.length) != (owner, length) for one in sequences):
            return {}
        return {owner: first + count - 1}

    def pick(self, places: Sequence[int]) -> Any:
        """Return hidden states [n, features] at places that `find_places` has returned."""
        if self._kept is None:
            raise ValueError("no step has been kept")
        return self._kept[3](np.array(places, np.int64))
