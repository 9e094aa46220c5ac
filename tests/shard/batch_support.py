"""Makes batches and moves them, for tests of the running set."""

from __future__ import annotations

from tests.shard.scripted_router import BLOCK
from tgi_trio.ipc.messages import StepReport
from tgi_trio.shard.batch import Batch
from tgi_trio.shard.speculation.sharing import Drafter
from tgi_trio.shard.step import RowResult, StepPlan, StepResult

EOS = 2
BUDGET = 10**6


def new_batch(
    blocks: int = 10_000, drafter: Drafter | None = None, cheap_tokens: int = BUDGET
) -> Batch:
    return Batch(
        vocab_size=100,
        block_size=BLOCK,
        blocks=blocks,
        eos_ids=[EOS],
        drafter=drafter,
        cheap_tokens=cheap_tokens,
    )


def answer(plan: StepPlan, token: int = 7) -> StepResult:
    """One token for every row that wants one."""
    rows = [RowResult((token,), (-1.0,)) if s else RowResult() for s in plan.samples.tolist()]
    return StepResult(rows, 0, 0)


def step(batch: Batch, token: int = 7, budget: int = BUDGET) -> tuple[StepReport, list[int]]:
    """Run one step; return its report and the ids of the sequences dropped."""
    plan = batch.plan(budget)
    assert plan is not None
    report = StepReport(1, 1)
    dropped, faults = batch.advance(plan, answer(plan, token), report)
    assert not faults
    batch.check()
    return report, [sequence.id for sequence in dropped]
