"""Rank 0's runner for pipeline parallelism, where each rank computes a run of the layers.

A plan is sent to all stages when it is launched. Rank 0 has the last layers and computes them when
the result is asked for. In between, the other stages work on the plan and rank 0 on another one:
several plans of different sequences (micro-batches) are in flight.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tgi_trio.shard.contract import (
    ShardSequence,
    StepPlan,
    StepResult,
)
from tgi_trio.shard.ranks.leader import Followers, GroupRunner, failing_together
from tgi_trio.shard.runner import Pending, Runner


@dataclass(slots=True)
class _StagedStep:
    """See `Pending`: a step that the other stages are computing."""

    pipeline: PipelineRunner
    plan: StepPlan
    found: StepResult | None = None
    leaving: list[ShardSequence] = field(default_factory=list)  # dropped while it was in flight

    def proceed(self) -> None:
        return None

    def result(self) -> StepResult:
        return self.pipeline.finish(self)


class PipelineRunner(GroupRunner):
    """A `Runner` with several steps of different sequences in flight.

    Hidden states arrive in the order of launches, so rank 0 computes in that order too, whichever
    result is asked for first.
    """

    def __init__(self, runner: Runner, followers: Followers) -> None:
        """`runner` holds the last stage."""
        super().__init__(runner, followers)
        self._under_way: deque[_StagedStep] = deque()

    def runs_ahead(self, plan: StepPlan) -> bool:
        return False  # a row's next step needs its last token

    def launch(self, plan: StepPlan) -> Pending:
        """Begin a plan on the other stages; asking for its result computes the last stage."""
        self._followers.compute(plan)
        step = _StagedStep(self, plan)
        self._under_way.append(step)
        return step

    def finish(self, step: _StagedStep) -> StepResult:
        """Compute the last stage of every step up to this one; raises GroupBroken."""
        while step.found is None:
            oldest = self._under_way.popleft()
            with failing_together():
                oldest.found = self._runner.step(oldest.plan)
            for sequence in oldest.leaving:
                self._runner.drop(sequence)
        return step.found

    def drop(self, sequence: ShardSequence) -> None:
        """Forget a sequence, once no step in flight samples for it."""
        for step in reversed(self._under_way):
            if any(row is sequence for row in step.plan.rows):
                step.leaving.append(sequence)
                return
        super().drop(sequence)
