"""Decides which requests are late: too late for their first token to be in time."""

from __future__ import annotations

_WEIGHT = 0.1  # of the newest sample in the moving average
_TIMES = 3.0  # without a set target: the target is this many times a prompt's time
_LEAST_S = 1.0  # without a set target: the shortest target, seconds


class TtftTarget:
    """How long a request may wait in the queue until it is late.

    That is half of the target for first tokens; the other half is for computing the prompt. If no
    target is set, it is a multiple of the time that prompts take on this server (from admission to
    first token, as a moving average).
    """

    def __init__(self, target: float | None) -> None:
        """`target`: seconds from arrival to first token, or None."""
        self._target = target
        self._prompt: float | None = None  # seconds that a prompt takes

    def note(self, seconds: float) -> None:
        """Note that a first token came `seconds` after its admission."""
        old = self._prompt
        self._prompt = seconds if old is None else old + _WEIGHT * (seconds - old)

    @property
    def longest_wait(self) -> float:
        """Seconds in the queue after which a request is late."""
        if self._target is not None:
            return self._target / 2
        return max(_LEAST_S, _TIMES * (self._prompt or 0.0)) / 2
