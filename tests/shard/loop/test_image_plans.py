"""Plans of prompts with images: how tokens turn, what they see, where steps end."""

from __future__ import annotations

import numpy as np
import pytest

from tests.shard.loop.batch_support import answer, new_batch, step
from tests.shard.loop.scripted_router import row
from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.loop.batch import Batch
from tgi_trio.shard.media.prompt_geometry import ImageGrid, PromptGeometry, turn_by_grids
from tgi_trio.shard.plan_parts import cut_plan, slice_plan

TURNS = turn_by_grids([ImageGrid(2, 2, 3)])  # tokens 2 to 7 of a prompt
SPANS = np.array([[2, 6]])


def planned(batch: Batch, budget: int) -> StepPlan:
    plan = batch.plan(budget)
    assert plan is not None
    return plan


def taken(plan: StepPlan) -> dict[int, int]:
    counts = np.diff(plan.query_starts).tolist()
    return {each.id: count for each, count in zip(plan.rows, counts, strict=True)}


def test_tokens_of_an_image_turn_by_their_grid_and_later_ones_lag() -> None:
    batch = new_batch()
    batch.add(row(1, range(10, 20), 3))
    batch.add(row(2, [21, 22], 3))
    batch.shape(1, PromptGeometry(turns=TURNS))
    first = planned(batch, 6)
    assert [each.id for each in first.rows] == [2, 1] and first.visible is None
    assert first.rotary_positions is not None
    assert first.rotary_positions[:, :2].tolist() == [[0, 1]] * 3
    assert first.rotary_positions[:, 2:].tolist() == [[0, 1, 2, 2], [0, 1, 2, 2], [0, 1, 2, 3]]
    batch.settle(first, answer(first))
    second = planned(batch, 20)
    assert second.rotary_positions is not None
    np.testing.assert_array_equal(second.rotary_positions[:, 0], [2, 2, 2])
    np.testing.assert_array_equal(second.rotary_positions[:, 1:5], TURNS[:, 4:])
    np.testing.assert_array_equal(second.rotary_positions[:, 5:], [[5, 6]] * 3)
    batch.settle(second, answer(second))
    batch.check()
    for at in (10, 11):  # of the first of them, and of those that follow without a command
        steady = planned(batch, 20)
        assert steady.rotary_positions is not None
        by_row = {each.id: i for i, each in enumerate(steady.rows)}
        assert steady.positions[by_row[1]] == at
        np.testing.assert_array_equal(steady.rotary_positions[:, by_row[1]], [at - 3] * 3)
        if 2 in by_row:
            assert (steady.rotary_positions[:, by_row[2]] == steady.positions[by_row[2]]).all()
        batch.settle(steady, answer(steady))


def test_text_behind_an_image_that_does_not_lag_turns_by_its_place() -> None:
    """Positions may have any number of parts; decodes need none of their own."""
    batch = new_batch()
    batch.add(row(1, range(10, 20), 3))
    batch.add(row(2, [21, 22], 3))
    turns = np.tile(np.arange(6), (4, 1))
    turns[1:, 2:5] = [[0, 1, 0], [0, 0, 1], [0, 0, 0]]
    batch.shape(1, PromptGeometry(turns=turns))
    first = planned(batch, 20)
    assert [each.id for each in first.rows] == [2, 1] and first.rotary_positions is not None
    assert first.rotary_positions[:, :2].tolist() == [[0, 1]] * 4
    np.testing.assert_array_equal(first.rotary_positions[:, 2:8], turns)
    np.testing.assert_array_equal(first.rotary_positions[:, 8:], [[6, 7, 8, 9]] * 4)
    batch.settle(first, answer(first))
    for _ in range(2):
        steady = planned(batch, 20)
        assert steady.rotary_positions is None
        batch.settle(steady, answer(steady))
    batch.check()


def test_a_lone_row_behind_an_image_turns_with_what_it_lags() -> None:
    batch = new_batch()
    batch.add(row(1, range(10, 20), 4))
    batch.shape(1, PromptGeometry(turns=TURNS))
    step(batch)
    for at in (10, 11, 12):
        plan = planned(batch, 20)
        assert plan.positions.tolist() == [at] and plan.visible is None
        np.testing.assert_array_equal(plan.rotary_positions, [[at - 3]] * 3)
        batch.settle(plan, answer(plan))


def test_a_batch_without_images_says_nothing_of_them() -> None:
    batch = new_batch()
    batch.add(row(1, range(10, 20), 3))
    batch.add(row(2, [21, 22], 9))
    batch.shape(1, PromptGeometry(turns=TURNS))
    batch.remove([1])
    for _ in range(3):
        plan = planned(batch, 20)
        assert plan.rotary_positions is None and plan.visible is None
        batch.settle(plan, answer(plan))


@pytest.mark.parametrize(
    ("budget", "steps"),
    [(20, [10]), (7, [7, 3]), (5, [2, 5, 3]), (4, [2, 4, 4]), (3, [2, 4, 3, 1])],
)
def test_a_step_never_ends_within_a_span(budget: int, steps: list[int]) -> None:
    """Where the budget is less than the span, the step has the span alone."""
    batch = new_batch()
    batch.add(row(1, range(10, 20), 3))
    batch.shape(1, PromptGeometry(spans=SPANS))
    for count in steps:
        plan = planned(batch, budget)
        assert taken(plan) == {1: count}
        lasts = np.where((plan.positions >= 2) & (plan.positions < 6), 5, plan.positions)
        if (lasts == plan.positions).all():
            assert plan.visible is None
        else:
            np.testing.assert_array_equal(plan.visible, lasts)
        assert plan.rotary_positions is None
        batch.settle(plan, answer(plan))
    assert batch.rows[0].computed == 10


def test_what_a_span_leaves_goes_to_others_and_nobody_waits_for_it() -> None:
    batch = new_batch()
    batch.add(row(1, range(10, 20), 3))
    batch.add(row(2, range(30, 42), 3))
    batch.shape(1, PromptGeometry(spans=SPANS))
    assert taken(planned(batch, 5)) == {1: 2, 2: 3}
    plan = planned(batch, 5)
    batch.settle(plan, answer(plan))
    assert taken(planned(batch, 3)) == {2: 3}  # nothing of the span fits
    assert taken(planned(batch, 6)) == {1: 6}
    batch.add(row(3, [50, 51], 3, blocks=[20, 21]))
    plan = planned(batch, 2)
    assert taken(plan) == {3: 2}
    batch.settle(plan, answer(plan))
    assert taken(planned(batch, 5)) == {3: 1, 1: 4}


def test_parts_of_a_plan_keep_what_images_say() -> None:
    batch = new_batch()
    batch.add(row(1, range(10, 20), 3))
    batch.add(row(2, range(30, 42), 3))
    batch.shape(1, PromptGeometry(turns=TURNS, spans=SPANS))
    plan = planned(batch, 30)
    part = slice_plan(plan, 0, 1)
    assert part.rotary_positions is not None and part.visible is not None
    np.testing.assert_array_equal(part.rotary_positions[:, :8], TURNS)
    assert part.visible.tolist() == [0, 1, 5, 5, 5, 5, 6, 7, 8, 9]
    cut = cut_plan(plan, np.array([1, 0]), np.array([6, 12]))
    assert cut.rotary_positions is not None and cut.visible is not None
    np.testing.assert_array_equal(cut.rotary_positions[:, :5], TURNS[:, 1:6])
    assert cut.visible[:5].tolist() == [1, 5, 5, 5, 5]


def test_a_row_is_shaped_once_it_is_there() -> None:
    batch = new_batch()
    batch.add(row(1, range(10, 20), 3))
    batch.shape(1, PromptGeometry(turns=TURNS))
    assert batch.rows[0].rotary_delta == -3
    batch.check()
    step(batch)
    batch.clear()
    batch.add(row(2, [21, 22], 3))
    assert planned(batch, 9).rotary_positions is None
