"""Decides from measured steps whether drafting pays at a batch size. No torch in this file.

A step with drafts takes longer than one without, and yields more tokens. Which is faster depends
on the model, the machine, the text and the number of rows, so both are measured while serving. A
batch size at which drafting loses does without it for a while: long enough to make up for the cost
of the trial, and twice as long after each further failure. A trial ends early if none of its first
drafts is right.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import islice
from math import sqrt
from statistics import fmean
from typing import Final

PROBES: Final = 2  # steps with drafts, none of them right, that end a trial
TRIAL: Final = 3  # steps with drafts, some of them right, before they are evaluated
PLAIN: Final = 3  # least steps without drafts for comparison
REFRESH: Final = 96  # steps with drafts after which plain ones are measured again
# After this many steps, drafts are evaluated only once per as many, since that takes time.
EVERY: Final = 8
FIRST_REST: Final = 32  # least steps without drafts after a trial that did not pay
LONGEST_REST: Final = 2048
BELIEVED: Final = 16  # steps with drafts from which on the mean decides, without a margin
SPENT: Final = 0.01  # largest share of the time until the next trial that a trial may cost
_WINDOW: Final = 48  # latest steps of a kind that count
_LATEST: Final = 8  # the quickest of this many latest steps is the time of such a step
_LEAST_GAIN: Final = 1.01  # least ratio of tokens a second with and without drafts


@dataclass(slots=True)
class _Measured:
    """Measurements of the steps of one batch size."""

    plain_ns: deque[int] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    drafted_ns: deque[int] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    # Time of drafting for each of them, with the preceding attempts that found nothing.
    drafting_ns: deque[int] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    owed_ns: int = 0
    tokens: deque[int] = field(default_factory=lambda: deque(maxlen=_WINDOW))  # of those drafted
    right: bool = False  # whether a draft was right since the last rest
    rest: int = 0  # plans that still get no drafts
    failures: int = 0  # trials in a row that did not pay
    since_plain: int = 0  # steps with drafts since plain ones were measured
    forced: int = 0  # plans still to have no drafts, so that plain steps are measured


class Payoff:
    """The gains of drafting, by the number of decoding rows."""

    def __init__(self) -> None:
        self._by_rows: defaultdict[int, _Measured] = defaultdict(_Measured)

    def allows(self, rows: int) -> bool:
        """Return whether a step of `rows` rows is to have drafts; called once per step."""
        found = self._by_rows[rows]
        if found.rest:
            found.rest -= 1
            return False
        if found.forced:
            found.forced -= 1
            return False
        return True

    def is_resting(self, rows: int) -> bool:
        """Return whether `allows` would return False, without counting a step."""
        found = self._by_rows.get(rows)
        return found is not None and found.rest > 0

    def note(
        self, rows: int, *, drafted: bool, tokens: int, took_ns: int, drafting_ns: int = 0
    ) -> None:
        """Note a step of `rows` decodes: its tokens, its time, and the time of drafting for it.

        If the drafter found nothing to draft, its time is counted with the next drafts.
        """
        found = self._by_rows[rows]
        if took_ns <= 0:
            return
        if not drafted:
            found.plain_ns.append(took_ns)
            found.owed_ns += drafting_ns
            failed = len(found.drafted_ns) >= PROBES and not found.right
            if failed and len(found.plain_ns) == PLAIN:  # the trial has waited for plain steps
                self._judge(rows, found)
            return
        found.drafted_ns.append(took_ns)
        found.drafting_ns.append(drafting_ns + found.owed_ns)
        found.owed_ns = 0
        found.tokens.append(tokens)
        found.since_plain += 1
        found.right |= tokens > rows
        if len(found.drafted_ns) < (TRIAL if found.right else PROBES) or found.forced:
            return
        if len(found.plain_ns) < PLAIN or found.since_plain >= REFRESH:
            found.forced, found.since_plain = PLAIN, 0
            return
        if len(found.drafted_ns) <= EVERY or found.since_plain % EVERY == 0:
            self._judge(rows, found)

    def gain(self, rows: int) -> float | None:
        """Return the ratio of tokens a second with and without drafts; None if not known yet."""
        found = self._by_rows.get(rows)
        if found is None or not found.drafted_ns or len(found.plain_ns) < PLAIN:
            return None
        return fmean(found.tokens) / _worth(rows, found)

    def _judge(self, rows: int, found: _Measured) -> None:
        """Rest from drafting if it loses; with few steps, by more than the standard error."""
        worth, brought, steps = _worth(rows, found), fmean(found.tokens), len(found.tokens)
        doubt = _spread(found.tokens) / sqrt(steps) if steps < BELIEVED else 0.0
        if found.right and (brought + doubt) / worth >= _LEAST_GAIN:
            found.failures = 0
            return
        lost = (worth - brought) / rows * steps  # in plain steps
        rest = max(FIRST_REST, round(lost / SPENT)) << min(found.failures, 16)
        found.rest, found.failures = min(LONGEST_REST, rest), found.failures + 1
        found.right = False
        found.drafted_ns.clear()
        found.drafting_ns.clear()
        found.tokens.clear()


def _worth(rows: int, found: _Measured) -> float:
    """Return the tokens that plain decoding makes in the time of a step with drafts."""
    # The quickest of steps, since others are slow because of other load on the machine. The mean of
    # drafting, since a draft model is slow only when it reads a long prompt, which is a real cost.
    took = _quickest(found.drafted_ns) + fmean(found.drafting_ns)
    return rows * took / _quickest(found.plain_ns)


def _quickest(steps: deque[int]) -> int:
    """Return the minimum of the latest times."""
    return min(islice(reversed(steps), _LATEST))


def _spread(numbers: Collection[int]) -> float:
    """Return the standard deviation; `statistics.pstdev` takes a tenth of a small model's step."""
    mean = fmean(numbers)
    return sqrt(max(0.0, fmean(n * n for n in numbers) - mean * mean))
