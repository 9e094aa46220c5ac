"""The hidden state at which a sequence's last token was chosen: runners leave it, heads read it.

No torch in this file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.contract import Choices, ShardSequence, StepPlan

_STATE: Final = "hidden"  # key in ShardSequence.state


class LastHidden(NamedTuple):
    """A hidden state [features], before the final norm, as the backend has it."""

    length: int  # of the sequence once the tokens of that step are known
    row: Any


def leave_hidden(
    plan: StepPlan,
    sampled: NDArray[np.intp],
    choices: Choices,
    pick: Callable[[NDArray[np.int64]], Any],
) -> None:
    """Leave each sampled row the hidden state that chose its last token.

    `choices`: of the rows `sampled`; `pick`: returns a copy of the hidden states at places of the
    plan's flat list of tokens.
    """
    drafts = 0 if plan.drafts is None else plan.drafts[sampled]
    firsts = plan.query_starts[1:][sampled].astype(np.int64) - 1 - drafts
    chosen = choices.counts > 0
    hidden = pick((firsts + choices.counts - 1)[chosen])
    rows = zip(sampled[chosen].tolist(), choices.counts[chosen].tolist(), strict=True)
    for i, (row, count) in enumerate(rows):
        sequence = plan.rows[row]
        sequence.state[_STATE] = LastHidden(sequence.length + count, hidden[i])


def last_hidden(sequence: ShardSequence) -> Any | None:
    """Return the hidden state that chose a sequence's last known token, None where it is gone."""
    found = sequence.state.get(_STATE)
    if isinstance(found, LastHidden) and found.length == sequence.length:
        return found.row
    return None
