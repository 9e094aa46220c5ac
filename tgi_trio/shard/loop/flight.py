"""A step in flight: launched, or to be launched when it is settled."""

from __future__ import annotations

from dataclasses import dataclass

from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.runner import Pending


@dataclass(slots=True)
class Flight:
    """A step that is being computed."""

    number: int
    plan: StepPlan
    started: int  # perf_counter_ns
    pending: Pending | None = None  # None: it is to be launched when it is settled

    def gap_after(self, ended: int) -> int:
        """Return the nanoseconds from `ended`, the end of the previous step, to this one's start.

        0 if it was started before that end, or if `ended` is 0 (no step came right before).
        """
        gap = self.started - ended
        return gap if gap > 0 and ended else 0
