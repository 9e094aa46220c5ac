"""A step in flight: launched, or to be launched when it is settled."""

from __future__ import annotations

from dataclasses import dataclass

from tgi_trio.shard.contract import StepPlan, StepResult
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

    def describe(self, result: StepResult, gap_ns: int) -> dict[str, int]:
        """Return what STEP says of the step as a whole, once it has been computed."""
        counts, drafts = self.plan.counts, result.drafts
        return {
            "step": self.number,
            "gap_ns": gap_ns,
            "forward_ns": result.forward_ns,
            "sample_ns": result.sample_ns,
            "prefill_tokens": counts.prefill_tokens,
            "decode_rows": counts.decode_rows,
            "stalled_rows": counts.stalled_rows,
            "draft_tokens": counts.draft_tokens if drafts is None else int(drafts.sum()),
        }
