"""Who has waited too long for a first token in time."""

from __future__ import annotations

_WEIGHT = 0.1  # of the newest sample in the moving average
_TIMES = 3.0  # as long as its prompt takes may a request wait
_LEAST_S = 1.0  # nobody is late before


class TtftTarget:
    """How long a request may wait until those go first that can still be in time.

    Half of the target for first tokens: the other half is for the prompt. Without a target it is
    what people put up with: a multiple of the time that prompts take here, from admission to
    first token, as a moving average.
    """

    def __init__(self, target: float | None) -> None:
        """`target`: seconds from arrival to first token, or None."""
        self._target = target
        self._prompt: float | None = None  # seconds it takes

    def note(self, seconds: float) -> None:
        """A first token came `seconds` after the admission."""
        old = self._prompt
        self._prompt = seconds if old is None else old + _WEIGHT * (seconds - old)

    @property
    def longest_wait(self) -> float:
        """Seconds in the queue after which a request is late."""
        if self._target is not None:
            return self._target / 2
        return max(_LEAST_S, _TIMES * (self._prompt or 0.0)) / 2
