"""Features of images in plans that are cut: they stay with their tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.shard.loop.batch_support import new_batch
from tests.shard.loop.scripted_router import row
from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.media.placed_features import PlacedFeatures
from tgi_trio.shard.plan_parts import cut_plan, slice_plan


def plan_of_three() -> StepPlan:
    """Return rows of 3, 4 and 5 tokens; features at tokens 1, 3, 4, 5 and 11 of the 12."""
    batch = new_batch()
    for i in (1, 2, 3):
        batch.add(row(i, list(range(10 * i, 11 * i + 2)), 9))
    plan = batch.plan(100)
    assert plan is not None and plan.query_starts.tolist() == [0, 3, 7, 12]
    places = np.array([1, 3, 4, 5, 11])
    rows = np.stack((places, places), axis=1).astype(np.float32)
    return replace(
        plan,
        features=PlacedFeatures(places, rows, {0: rows + 100}),
        rotary_positions=np.tile(np.arange(12), (3, 1)),
        visible=np.arange(12) + 1,
    )


def test_a_slice_keeps_the_features_of_its_rows() -> None:
    part = slice_plan(plan_of_three(), 1, 2)
    assert part.features is not None
    assert part.features.places.tolist() == [0, 1, 2]
    assert part.features.rows[:, 0].tolist() == [3, 4, 5]
    assert part.features.deep[0][:, 1].tolist() == [103, 104, 105]
    assert part.rotary_positions is not None and part.rotary_positions[2].tolist() == [3, 4, 5, 6]
    assert part.visible is not None and part.visible.tolist() == [4, 5, 6, 7]


def test_a_cut_keeps_the_features_of_its_tokens() -> None:
    part = cut_plan(plan_of_three(), np.array([0, 2, 3]), np.array([1, 4, 5]))
    assert part.token_ids.tolist() == [10, 22, 23, 33, 34]
    assert part.features is not None
    assert part.features.places.tolist() == [1, 4]
    assert part.features.rows[:, 0].tolist() == [5, 11]
    assert part.features.deep[0][:, 0].tolist() == [105, 111]
    assert part.rotary_positions is not None and part.rotary_positions[0].tolist() == [
        *(0, 5, 6, 10, 11)
    ]
    assert part.visible is not None and part.visible.tolist() == [1, 6, 7, 11, 12]


def test_a_part_without_features_has_none() -> None:
    plan = plan_of_three()
    none = cut_plan(plan, np.array([0, 3, 0]), np.array([1, 4, 1]))
    assert none.features is None
    plain = slice_plan(replace(plan, features=None, rotary_positions=None, visible=None), 0, 2)
    assert plain.features is None and plain.rotary_positions is None and plain.visible is None
