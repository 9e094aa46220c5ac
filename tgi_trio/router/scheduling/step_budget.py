"""The token budget of a step (chunked prefill), and how fast the queue drains."""

from __future__ import annotations

import math

from tgi_trio.ipc.messages import StepReport
from tgi_trio.router.scheduling.limits import SchedulingLimits
from tgi_trio.router.scheduling.running_batch import RunningBatch

_ROUND = 16  # tokens; smaller changes of the budget are not worth a command
_LEAST_SHARE = 16  # prompts always get at least 1 / 16 of the token budget
_WEIGHT = 0.1  # of the newest sample in a moving average
_GROWTH = 1.25  # largest factor by which a share grows from one step to the next
_MARGIN = 0.8  # share of the allowed time to aim at, since equal steps vary in time
_FLAT = 1.25  # on the plateau steps take at most this many times the smallest steps' time
_FORGOTTEN = 256  # steps with prompts after which a size that took longer is tried again


class PrefillShare:
    """How many prompt tokens fit into a step's time limit, learned from measured steps."""

    def __init__(self, first: int, least: float, most: int) -> None:
        """Begin with `first` tokens and stay within `least` and `most`."""
        self.tokens = float(first)
        self._least = least
        self._most = float(most)

    def adapt(self, tokens: int, took_ns: float, base_ns: float, limit_ns: float) -> None:
        """Learn from a step with `tokens` prompt tokens.

        It took `took_ns`; without prompts a step takes `base_ns`; `limit_ns` is the time allowed.
        """
        extra = took_ns - base_ns
        fitting = tokens * (limit_ns - base_ns) / extra if extra > 0.0 else self._most
        if took_ns > limit_ns:
            self.tokens = max(self._least, min(self.tokens, fitting))
        elif tokens >= 0.75 * self.tokens:  # a much smaller step says little about the limit
            grown = min(self.tokens * _GROWTH, fitting, self._most)
            self.tokens = max(self.tokens, grown)


class Plateau:
    """How many prompt tokens a step can have at hardly more than the time of the fewest.

    On a device the host may take longer to launch a step with a prompt, of any length, than the
    device takes to compute it: then more tokens cost no time. Sizes are grouped by powers of two.
    """

    def __init__(self, least: float) -> None:
        """`least`: steps of up to about twice as many tokens form the smallest size."""
        self._first = math.ceil(math.log2(2 * least))
        self._took_ns: dict[int, float] = {}  # moving averages, by power of two
        self._seen: dict[int, int] = {}  # value of `_steps` at the last sample of a size
        self._steps = 0

    @property
    def floor_ns(self) -> float:
        """Time of a step of the smallest size; 0: not known yet."""
        return self._took_ns.get(self._first, 0.0)

    def note(self, tokens: int, took_ns: float) -> None:
        """Note that a step with `tokens` prompt tokens took `took_ns`."""
        size = max(self._first, (tokens - 1).bit_length())
        before = self._took_ns.get(size)
        self._took_ns[size] = took_ns if before is None else before + _WEIGHT * (took_ns - before)
        self._steps += 1
        self._seen[size] = self._steps

    def tokens(self, most: int) -> int:
        """Return the plateau's prompt tokens, or more to try; 0 if larger steps take longer."""
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
    """The token budget of a step, which stays in force until it is changed.

    Decode rows come first in every step; the budget limits the prompt tokens beside them.

    - While no sequence generates, a step has the full `token_budget`.
    - While some generate, prompts may make a step at most `stretch` times as long as one without
      prompts, as measured. If even the fewest prompt tokens take longer, a step has as many as take
      hardly longer than the fewest (`Plateau`).
    - Under pressure, prompts may fill a step up to `target_itl` and `max_batch_prefill_tokens`,
      since clients were promised no shorter steps. That is while requests wait behind the
      `max_batch_prefill_tokens` on the shard, at least `waiting_served_ratio` per generating
      sequence; while fewer wait, for one step after every `max_waiting_tokens`. Requests that wait
      for memory do not count, since larger steps would not help them.
    - A run of image tokens that has to be computed in one step fits the budget in any case.
    """

    def __init__(self, limits: SchedulingLimits) -> None:
        budget = limits.token_budget
        least = max(1.0, budget / _LEAST_SHARE)
        self._limits = limits
        self._plateau = Plateau(least)
        self._decode_ns = 0.0  # time of a step without prompts, moving average; 0: unknown yet
        self._unhurried = PrefillShare(budget, least, budget)
        self._pressed_share = PrefillShare(
            budget, least, max(budget, limits.max_batch_prefill_tokens)
        )
        self._behind = 0  # requests that wait behind other prompts
        self._waited = 0  # steps in which any waited, modulo max_waiting_tokens + 1
        self._budget = budget

    def observe(self, step: StepReport) -> None:
        """Learn from a step's report."""
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
        """Return the token budget; `behind`: requests that wait behind other prompts."""
        limits = self._limits
        self._behind = behind
        if not batch.prefilling:
            return self._budget  # no prompts: it does not matter, so do not send a change
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
        """Return the seconds of `retry-after` for a refused client, between 1 and 60."""
        return min(60.0, max(1.0, self.seconds_for(tokens)))
