"""How large a step may be, and how fast the queue drains."""

from __future__ import annotations

from tgi_trio.ipc.messages import StepReport
from tgi_trio.router.scheduling.batch import Batch
from tgi_trio.router.scheduling.limits import SchedulingLimits

_ROUND = 16  # tokens; a budget that moves less is not worth a command
_LEAST_SHARE = 16  # prompts always get at least this part of the token budget
_WEIGHT = 0.1  # of the newest sample in a moving average


class Pace:
    """The standing token budget of a step.

    Decode rows come first in every step; this decides how many prompt tokens may ride along.

    - Nobody generates: the full `token_budget`.
    - Somebody does: as many as make a step at most `stretch` times as long as one without a
      prompt, learned from the steps' own times.
    - `max_batch_prefill_tokens` are on the shard and more requests wait behind them, more than
      `waiting_served_ratio` for each one that generates or for more than `max_waiting_tokens`
      steps: the full budget. A step then takes longer for those who generate, by no more than
      `token_budget` costs. Those who wait for memory do not count: larger steps give them none.
    """

    def __init__(self, limits: SchedulingLimits) -> None:
        self._limits = limits
        self._decode_ns = 0.0  # of a step without prompts, moving average; 0: not known yet
        self._share = float(limits.token_budget)  # prompt tokens that ride along
        self._least = max(1.0, limits.token_budget / _LEAST_SHARE)
        self._behind = 0  # requests that wait behind prompts
        self._waited = 0  # steps for which there have been any
        self._budget = limits.token_budget

    def observe(self, step: StepReport) -> None:
        """Learn from a step."""
        self._waited = self._waited + 1 if self._behind else 0
        if not step.decode_rows or not step.forward_ns:
            return
        if not step.prefill_tokens:
            known = self._decode_ns
            self._decode_ns += (step.forward_ns - known) * (_WEIGHT if known else 1.0)
        elif self._decode_ns:
            self._adapt(step.forward_ns / self._decode_ns, step.prefill_tokens)

    def _adapt(self, stretch: float, tokens: int) -> None:
        """A step with `tokens` prompt tokens took `stretch` times one without."""
        wanted = self._limits.stretch
        if stretch > wanted:
            fitting = tokens * (wanted - 1.0) / (stretch - 1.0)
            self._share = max(self._least, min(self._share, fitting))
        elif tokens >= 0.75 * self._share:  # what rode along says something about the limit
            self._share = min(self._share * 1.1, float(self._limits.token_budget))

    def budget(self, batch: Batch, behind: int) -> int:
        """Return the tokens a step may compute now, while `behind` requests wait for prompts."""
        limits = self._limits
        self._behind = behind
        if not batch.prefilling:
            return self._budget  # nothing rides along: leave it
        budget = limits.token_budget
        if batch.running and self._decode_ns and not self._pressed(batch.running):
            budget = min(budget, -(-(len(batch) + int(self._share)) // _ROUND) * _ROUND)
        self._budget = budget
        return budget

    def _pressed(self, running: int) -> bool:
        limits = self._limits
        if not self._behind:
            return False
        many = self._behind >= limits.waiting_served_ratio * running
        return many or self._waited > limits.max_waiting_tokens


class DrainRate:
    """Prompt tokens that leave a busy queue per second, as a moving average."""

    def __init__(self) -> None:
        self._rate: float | None = None
        self._since: float | None = None  # last admission that left others waiting

    def note(self, tokens: int, others_wait: bool, now: float) -> None:
        """`tokens` prompt tokens were admitted."""
        if self._since is not None and now > self._since:
            sample = tokens / (now - self._since)
            old = self._rate
            self._rate = sample if old is None else old + _WEIGHT * (sample - old)
        self._since = now if others_wait else None

    def seconds_for(self, tokens: int) -> float:
        """Return about how long `tokens` queued tokens take to be admitted; 0.0 if unknown."""
        return tokens / self._rate if self._rate else 0.0

    def retry_after(self, tokens: int) -> float:
        """Return seconds to tell a client that is refused, between 1 and 60."""
        return min(60.0, max(1.0, self.seconds_for(tokens)))
