"""A row that decodes alone is planned as it is beside a row that sits out."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from tests.shard.loop.batch_support import BUDGET, advance, answer, new_batch
from tests.shard.loop.scripted_router import BLOCK, row
from tests.shard.loop.test_batch import Counting
from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.loop.batch import Batch


def facts(plan: StepPlan | None) -> dict[str, Any]:
    """Return the arrays of a plan, with their types."""
    assert plan is not None
    values = {field.name: getattr(plan, field.name) for field in fields(plan)}
    arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
    return {name: (str(value.dtype), value.tolist()) for name, value in arrays.items()}


def batch_of(others: int, drafts: bool) -> Batch:
    batch = new_batch(drafter=Counting() if drafts else None, draft_budget=8 if drafts else 0)
    batch.add(row(1, range(11, 11 + BLOCK), 9, blocks=[5, 9, 3]))
    for n in range(others):
        batch.add(row(2 + n, [21, 22], 9, blocks=[7, 8, 10]))
        batch.hold(2 + n)
    return batch


@pytest.mark.parametrize("drafts", [False, True])
def test_a_lone_row_is_planned_as_any_other(drafts: bool) -> None:
    """Over the end of a block and of its tokens, where no draft goes beyond the last one."""
    alone, beside = batch_of(0, drafts), batch_of(1, drafts)
    for _ in range(9):
        plan, other = alone.plan(BUDGET), beside.plan(BUDGET)
        assert plan is not None and other is not None
        assert facts(plan) == facts(other)
        assert alone.counts.draft_tokens == beside.counts.draft_tokens
        advance(alone, plan, answer(plan, 60))
        advance(beside, other, answer(other, 60))
    assert alone.plan(BUDGET) is None
