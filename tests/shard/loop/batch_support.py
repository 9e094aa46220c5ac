"""Makes batches and moves them, for tests of the running set."""

from __future__ import annotations

from tests.shard.loop.scripted_router import BLOCK
from tgi_trio.ipc.frame_codec import Frame
from tgi_trio.ipc.messages import StepReport, decode_step
from tgi_trio.shard.contract import (
    RowResult,
    StepPlan,
    StepResult,
)
from tgi_trio.shard.loop.batch import Batch
from tgi_trio.shard.loop.reply_frames import StepFrames
from tgi_trio.shard.loop.step_columns import StepChanges
from tgi_trio.shard.runner import Drafter

EOS = 2
BUDGET = 10**6


def new_batch(
    blocks: int = 10_000, drafter: Drafter | None = None, draft_budget: int = BUDGET
) -> Batch:
    return Batch(
        vocab_size=100,
        block_size=BLOCK,
        blocks=blocks,
        eos_ids=[EOS],
        drafter=drafter,
        draft_budget=draft_budget,
    )


def answer(plan: StepPlan, token: int = 7) -> StepResult:
    """One token for every row that wants one."""
    rows = [RowResult((token,), (-1.0,)) if s else RowResult() for s in plan.samples.tolist()]
    return StepResult.of(rows, 0, 0)


def advance(batch: Batch, plan: StepPlan, result: StepResult) -> tuple[StepReport, StepChanges]:
    """Move the batch; return the report as the router reads it, and the rest."""
    moved = batch.settle(plan, result)
    return read_report(moved), moved


def read_report(moved: StepChanges) -> StepReport:
    (frame,) = StepFrames().encode({"step": 1, "acknowledged": 1}, moved.columns, 1 << 20)
    return decode_step(Frame(memoryview(frame)))


def step(batch: Batch, token: int = 7, budget: int = BUDGET) -> tuple[StepReport, list[int]]:
    """Run one step; return its report and the ids of the sequences dropped."""
    plan = batch.plan(budget)
    assert plan is not None
    report, moved = advance(batch, plan, answer(plan, token))
    assert not moved.faults
    batch.check()
    return report, [sequence.id for sequence in moved.dropped]
