"""Whether guessing pays, by batch size, from how long steps took. No torch in this file.

A step with guesses takes longer than one without and brings more tokens. Which of the two wins
depends on the model, the machine, the text and how many rows share the step; so both are measured
while serving, and a batch size at which guessing loses rests from it, ever longer.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import sqrt
from statistics import fmean, median, pstdev
from typing import Final

TRIAL: Final = 3  # steps with guesses before they are judged
TRIAL_AGAIN: Final = 2  # the same after a rest
PLAIN: Final = 3  # steps without that they are compared with, at least
REFRESH: Final = 96  # steps with guesses after which some are plain, as contexts have grown
FIRST_REST: Final = 128  # steps without guesses after a trial that did not pay
LONGEST_REST: Final = 2048
_WINDOW: Final = 48  # the latest steps of a kind that count
_LEAST_GAIN: Final = 1.01  # tokens a second with guesses, in those without: less is a loss


@dataclass(slots=True)
class _Measured:
    """What the steps of one batch size have brought and taken."""

    plain_ns: deque[int] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    drafted_ns: deque[int] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    # What guessing took for each of them, and before it without finding anything to guess.
    drafting_ns: deque[int] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    owed_ns: int = 0
    tokens: deque[int] = field(default_factory=lambda: deque(maxlen=_WINDOW))  # of those drafted
    trial: int = TRIAL
    rest: int = 0  # plans that still get no guesses
    next_rest: int = FIRST_REST
    since_plain: int = 0  # steps with guesses since plain ones were measured
    forced: int = 0  # plans without guesses that are to come, so that there are plain steps


class Payoff:
    """What guessing has brought, by the number of rows that decode."""

    def __init__(self) -> None:
        self._by_rows: dict[int, _Measured] = {}

    def allows(self, rows: int) -> bool:
        """Return whether a step of so many rows is to have guesses; asked once for each."""
        found = self._by_rows.setdefault(rows, _Measured())
        if found.rest:
            found.rest -= 1
            return False
        if found.forced:
            found.forced -= 1
            return False
        return True

    def is_resting(self, rows: int) -> bool:
        """Return whether `allows` would say no; counts nothing."""
        found = self._by_rows.get(rows)
        return found is not None and found.rest > 0

    def note(
        self, rows: int, *, drafted: bool, tokens: int, took_ns: int, drafting_ns: int = 0
    ) -> None:
        """Take in a step of `rows` decodes: its tokens, how long it took, and the guessing for it.

        A drafter that was asked and found nothing has taken its time as well: that of the next
        guesses.
        """
        found = self._by_rows.setdefault(rows, _Measured())
        if took_ns <= 0:
            return
        if not drafted:
            found.plain_ns.append(took_ns)
            found.owed_ns += drafting_ns
            return
        found.drafted_ns.append(took_ns)
        found.drafting_ns.append(drafting_ns + found.owed_ns)
        found.owed_ns = 0
        found.tokens.append(tokens)
        found.since_plain += 1
        if len(found.drafted_ns) < found.trial or found.forced:
            return
        if len(found.plain_ns) < PLAIN or found.since_plain >= REFRESH:
            found.forced, found.since_plain = PLAIN, 0
            return
        self._judge(rows, found)

    def gain(self, rows: int) -> float | None:
        """Return tokens a second with guesses in those without, None while that is not known."""
        found = self._by_rows.get(rows)
        if found is None or not found.drafted_ns or len(found.plain_ns) < PLAIN:
            return None
        return fmean(found.tokens) / _worth(rows, found)

    def _judge(self, rows: int, found: _Measured) -> None:
        """Have guesses rest that lose, by more than what luck may be."""
        worth = _worth(rows, found)
        doubt = pstdev(found.tokens) / sqrt(len(found.tokens))
        if (fmean(found.tokens) + doubt) / worth >= _LEAST_GAIN:
            found.next_rest, found.trial = FIRST_REST, TRIAL
            return
        found.rest, found.next_rest = found.next_rest, min(LONGEST_REST, 2 * found.next_rest)
        found.trial = TRIAL_AGAIN
        found.drafted_ns.clear()
        found.drafting_ns.clear()
        found.tokens.clear()


def _worth(rows: int, found: _Measured) -> float:
    """Return the tokens that plain decoding makes in the time of a step with guesses."""
    # Of steps the median: a lone slow one is the machine's. Of guessing the mean: a smaller model
    # that reads a long prompt is slow once, and that is its own.
    took = median(found.drafted_ns) + fmean(found.drafting_ns)
    return rows * took / median(found.plain_ns)
