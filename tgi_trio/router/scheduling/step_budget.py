"""How large a step may be, and how fast the queue drains."""

from __future__ import annotations

import math

from tgi_trio.ipc.messages import StepReport
from tgi_trio.router.scheduling.limits import SchedulingLimits
from tgi_trio.router.scheduling.running_batch import RunningBatch

_ROUND = 16  # tokens; a budget that moves less is not worth a command
_LEAST_SHARE = 16  # prompts always get at least this part of the token budget
_WEIGHT = 0.1  # of the newest sample in a moving average
_GROWTH = 1.25  # a share grows by this factor at most, from one step to the next
_MARGIN = 0.8  # of the allowed time is aimed at: steps of one size do not take the same time
_FLAT = 1.25  # times what the fewest prompt tokens take: others take hardly longer
_FORGOTTEN = 256  # steps with prompts after which what took longer is tried again


class PrefillShare:
    """How many prompt tokens fit into a step, learned from how long steps take."""

    def __init__(self, first: int, least: float, most: int) -> None:
        """Begin with `first` tokens and stay within `least` and `most`."""
        self.tokens = float(first)
        self._least = least
        self._most = float(most)

    def adapt(self, tokens: int, took_ns: float, base_ns: float, limit_ns: float) -> None:
        """A step with `tokens` prompt tokens took `took_ns`, `base_ns` of it without them."""
        extra = took_ns - base_ns
        fitting = tokens * (limit_ns - base_ns) / extra if extra > 0.0 else self._most
        if took_ns > limit_ns:
            self.tokens = max(self._least, min(self.tokens, fitting))
        elif tokens >= 0.75 * self.tokens:  # what rode along says something about the limit
            grown = min(self.tokens * _GROWTH, fitting, self._most)
            self.tokens = max(self.tokens, grown)


class Plateau:
    """How many prompt tokens make a step hardly longer than the fewest do.

    There are such on a device where the host takes longer to launch a step with a prompt, of any
    length, than the device takes to compute it. Sizes of steps are grouped by powers of two.
    """

    def __init__(self, least: float) -> None:
        """Steps of up to twice `least` tokens count as those with the fewest."""
        self._first = math.ceil(math.log2(2 * least))
        self._took_ns: dict[int, float] = {}  # moving averages, by power of two
        self._seen: dict[int, int] = {}  # when that was
        self._steps = 0

    @property
    def floor_ns(self) -> float:
        """What a step with the fewest prompt tokens takes; 0: not known yet."""
        return self._took_ns.get(self._first, 0.0)

    def note(self, tokens: int, took_ns: float) -> None:
        """A step with `tokens` prompt tokens took `took_ns`."""
        size = max(self._first, (tokens - 1).bit_length())
        before = self._took_ns.get(size)
        self._took_ns[size] = took_ns if before is None else before + _WEIGHT * (took_ns - before)
        self._steps += 1
        self._seen[size] = self._steps

    def tokens(self, most: int) -> int:
        """Return how many, or how many to try next; 0: any more than the fewest take longer."""
        size = self._first
        while 1 << size < most:
            took = self._took_ns.get(size + 1)
            if took is None or self._steps - self._seen[size + 1] > _FORGOTTEN:
                size += 1
                break
            if took > _FLAT * self.floor_ns:
                break
            size += 1
        return 0 if size == self._first else min(most, (1 << size) - _ROUND)  # it is rounded up


class StepBudget:
    """The standing token budget of a step.

    Decode rows come first in every step; this decides how many prompt tokens may ride along.

    - While no sequence generates: the full `token_budget`.
    - While some do: as many as make a step at most `stretch` times as long as one without a
      prompt, learned from the steps' own times. Where even the fewest take longer than that, as
      many as take hardly longer than the fewest.
    - While `max_batch_prefill_tokens` are on the shard and further requests wait behind them, at
      least `waiting_served_ratio` for each sequence that generates: as many as fit into
      `target_itl`, up to `max_batch_prefill_tokens`; clients were promised no shorter steps. While
      fewer wait, the same for one step after every `max_waiting_tokens`. Requests that wait for
      memory do not count: larger steps give them none.
    - For a prompt with images whose tokens are computed together: at least as many as those are.
    """

    def __init__(self, limits: SchedulingLimits) -> None:
        budget = limits.token_budget
        least = max(1.0, budget / _LEAST_SHARE)
        self._limits = limits
        self._plateau = Plateau(least)
        self._decode_ns = 0.0  # of a step without prompts, moving average; 0: not known yet
        self._unhurried = PrefillShare(budget, least, budget)
        self._pressed_share = PrefillShare(
            budget, least, max(budget, limits.max_batch_prefill_tokens)
        )
        self._behind = 0  # requests that wait behind prompts
        self._waited = 0  # steps during which any waited, since one step last had more tokens
        self._budget = budget

    def observe(self, step: StepReport) -> None:
        """Learn from a step."""
        limits = self._limits
        self._waited = (self._waited + 1) % (limits.max_waiting_tokens + 1) if self._behind else 0
        if not step.decode_rows or not step.forward_ns:
            return
        base = self._decode_ns
        if not step.prefill_tokens:
            self._decode_ns += (step.forward_ns - base) * (_WEIGHT if base else 1.0)
        elif base:
            tokens, took = step.prefill_tokens, step.forward_ns
            calm = base * limits.stretch
            self._plateau.note(tokens, took)
            self._unhurried.adapt(tokens, took, base, calm)
            self._pressed_share.adapt(
                tokens, took, base, max(calm, _MARGIN * 1e9 * limits.target_itl)
            )

    def budget(self, batch: RunningBatch, behind: int) -> int:
        """Return the tokens a step may compute now, while `behind` requests wait for prompts."""
        limits = self._limits
        self._behind = behind
        if not batch.prefilling:
            return self._budget  # nothing rides along: leave it
        budget = limits.token_budget
        if batch.running and self._decode_ns:
            pressed = self._is_pressed(len(batch.running))
            most = limits.max_batch_prefill_tokens if pressed else budget
            tokens = int((self._pressed_share if pressed else self._unhurried).tokens)
            if self._plateau.floor_ns > self._decode_ns * limits.stretch:
                tokens = max(tokens, self._plateau.tokens(most))
            budget = min(most, -(-(len(batch) + tokens) // _ROUND) * _ROUND)
        if limits.image_sight != "causal":
            uncut = max(sequence.uncut for sequence in batch.prefilling.values())
            if uncut:
                budget = max(budget, min(len(batch) + uncut, limits.max_batch_prefill_tokens))
        self._budget = budget
        return budget

    def _is_pressed(self, running: int) -> bool:
        limits, behind = self._limits, self._behind
        if not behind:
            return False
        many = behind >= limits.waiting_served_ratio * running
        return many or self._waited == limits.max_waiting_tokens


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
