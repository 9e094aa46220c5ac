"""Rank 0's model as the worker loop sees it, where each rank computes a run of the layers.

A plan goes to all stages when it is launched; rank 0's own layers are the last, and computed when
somebody asks for the result. Between the two the other stages work on it, and rank 0 on the
result of another: several plans of different sequences are under way.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tgi_trio.shard.contract import Pending, Runner, ShardSequence, StepPlan, StepResult
from tgi_trio.shard.ranks.leader import Followers, GroupRunner, failing_together


@dataclass(slots=True)
class _StagedStep:
    """See `Pending`: rank 0's layers of a step that the stages before it have been told of."""

    pipeline: PipelineRunner
    plan: StepPlan
    found: StepResult | None = None
    leaving: list[ShardSequence] = field(default_factory=list)  # dropped while it was under way

    def proceed(self) -> None:
        return None

    def result(self) -> StepResult:
        return self.pipeline.finish(self)


class PipelineRunner(GroupRunner):
    """A `Runner` whose steps may be launched one after the other, of different sequences.

    Hidden states come in the order of the launches, so rank 0 computes in that order as well,
    whoever asks for which result first.
    """

    def __init__(self, runner: Runner, followers: Followers) -> None:
        """`runner` holds the last stage."""
        super().__init__(runner, followers)
        self._under_way: deque[_StagedStep] = deque()

    def runs_ahead(self, plan: StepPlan) -> bool:
        return False  # a row's next token needs its last

    def launch(self, plan: StepPlan) -> Pending:
        """Begin a plan on the other stages; its result computes the last one."""
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
        """Forget a sequence, once no step that is under way chooses a token for it."""
        for step in reversed(self._under_way):
            if any(row is sequence for row in step.plan.rows):
                step.leaving.append(sequence)
                return
        super().drop(sequence)
