"""Requests drafts for a batch from the drafter if they pay. No torch in this file."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Sequence

from tgi_trio.ipc.shard_output import warn
from tgi_trio.shard.contract import StepPlan, StepResult
from tgi_trio.shard.runner import (
    Drafter,
    DraftRow,
    FollowingDrafter,
)
from tgi_trio.shard.speculation.payoff import Payoff
from tgi_trio.shard.speculation.record import take_rest


class Drafting:
    """A drafter, and the costs and gains of its drafts."""

    def __init__(self, drafter: Drafter, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        """`clock`: nanoseconds."""
        self.payoff = Payoff()
        self._drafter: Drafter | None = drafter
        # The same drafter, if steps may follow others with unverified drafts.
        self._following: FollowingDrafter | None = None
        if isinstance(drafter, FollowingDrafter) and drafter.follows:
            self._following = drafter
        self._clock = clock
        self._drafting_ns = 0  # for the plan that has not been noted yet
        self._drafting_processor_ns = 0  # the same, of this thread's time on a processor
        self._rest = 0  # plans without drafts to come, since every sequence rests
        self._resting = 0  # number of these sequences

    def draft(self, rows: Sequence[DraftRow], spare: int) -> dict[int, int]:
        """Return drafts as `Drafter.draft_rows` does, but none if they do not pay.

        A drafter that has raised is no longer used.
        """
        self._drafting_ns = self._drafting_processor_ns = 0
        if not rows or self._drafter is None or self._takes_rest(len(rows)):
            return {}
        if not self.payoff.allows(len(rows)):
            return {}
        began, processor = self._clock(), time.thread_time_ns()
        try:
            counts = self._drafter.draft_rows(rows, spare)
        except Exception:  # any error of a backend: serving continues without drafts
            traceback.print_exc(file=sys.stderr)
            warn("what drafts has failed: tokens come one by one from now on")
            self._drafter = self._following = None
            return {}
        self._drafting_ns = self._clock() - began
        self._drafting_processor_ns = time.thread_time_ns() - processor
        if not counts:
            self._rest = take_rest(row.sequence for row in rows)
            self._resting = len(rows)
        return counts

    @property
    def follows(self) -> bool:
        """Whether steps may follow others with unverified drafts."""
        return self._following is not None

    def follow(self, rows: Sequence[DraftRow], spare: int) -> dict[int, int]:
        """Return how many drafts rows get in such a step, by place; none if they do not pay."""
        self._drafting_ns = self._drafting_processor_ns = 0
        if self._following is None or self._takes_rest(len(rows)):
            return {}
        if spare <= 0 or not self.payoff.allows(len(rows)):
            return {}
        return self._following.follow(rows, spare)

    def is_resting(self, rows: int) -> bool:
        """Return whether the next step of `rows` decodes gets no drafts."""
        if self._drafter is None or (self._rest > 0 and self._resting == rows):
            return True
        return self.payoff.is_resting(rows)

    def sits_out(self, rows: int) -> bool:
        """As `is_resting`, and count the step."""
        self._drafting_ns = self._drafting_processor_ns = 0
        if self._drafter is None or self._takes_rest(rows):
            return True
        return self.payoff.is_resting(rows) and not self.payoff.allows(rows)

    def _takes_rest(self, rows: int) -> bool:
        """Return whether all sequences rest in this step; if there are others, none rests."""
        if self._rest == 0 or self._resting != rows:
            self._rest = 0
            return False
        self._rest -= 1
        return True

    def note(self, plan: StepPlan, result: StepResult) -> None:
        """Learn from a plan's result. Steps with prompts, or that raised, do not count."""
        self._judge(plan, result)
        if plan.counts.prefill_tokens or result.raised or not plan.counts.decode_rows:
            return
        drafted = plan.drafts is not None
        took, drafting = result.forward_ns + result.sample_ns, self._drafting_ns
        if result.processor_ns:
            took, drafting = result.processor_ns, self._drafting_processor_ns
        self.payoff.note(
            plan.counts.decode_rows,
            drafted=drafted,
            tokens=len(result.choices.token_ids),
            took_ns=took,
            drafting_ns=drafting,
        )

    def _judge(self, plan: StepPlan, result: StepResult) -> None:
        """Report to a drafter without access to results how many of its drafts were right."""
        if plan.drafts is None or self._following is None or result.raised:
            return
        drafts = plan.drafts if result.drafts is None else result.drafts
        counts = zip(plan.rows, drafts.tolist(), result.choices.counts.tolist(), strict=True)
        for row, count, tokens in counts:
            if count and tokens:
                self._following.judge(row, count, tokens - 1)
