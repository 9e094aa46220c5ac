"""What ranks keep of images that layers attend to: each its heads, and all forget alike."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.shard.ranks.rank_processes import groups
from tests.shard.torch_backend.cross_attention_support import (
    CPU,
    DIM,
    HEADS,
    LAYERS,
    seeing,
    states,
)
from tgi_trio.ipc.frame_codec import Frame
from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.ranks.plan_frames import decode_plan, encode_plan
from tgi_trio.shard.torch_backend.image_states import CrossShape, ImageSource, KeptStates
from tgi_trio.shard.torch_backend.step_features import RowImages

TOKENS = 6


def check(rank: int, plan: StepPlan, found: tuple[RowImages, ...]) -> None:
    """Raise AssertionError unless a rank found its part of what the rows have."""
    whole = [row.images for row in plan.rows if row.images]
    assert [len(row.states) for row in found] == [len(images) for images in whole]
    wanted = [image.features.states for images in whole for image in images]
    for ours, theirs in zip((each for row in found for each in row.states), wanted, strict=True):
        assert theirs is not None and ours.visible == theirs.visible
        pairs = zip((*ours.keys, *ours.values), (*theirs.keys, *theirs.values), strict=True)
        assert all(torch.equal(got, of[:, 2 * rank : 2 * rank + 2]) for got, of in pairs)


def find(kept: list[KeptStates], told: list[StepPlan], rank: int) -> tuple[RowImages, ...]:
    return kept[rank].find(told[rank])


@pytest.mark.parametrize(("room", "handed"), [(0, 6), (2, 4), (3, 3)])
def test_every_rank_has_its_heads_and_forgets_as_the_others_do(room: int, handed: int) -> None:
    one, two, three = (states(number, TOKENS) for number in (1, 2, 3))
    steps = [((one,), ()), ((two,),), ((one, two), (two,)), ((three,),), ((two, one),)]
    with groups(2) as (together, members):
        kept = []
        for rank in range(2):
            mine = slice(2 * rank, 2 * rank + 2)
            shape = CrossShape(LAYERS, HEADS, DIM, torch.float32, mine)
            most = room * TOKENS * shape.bytes_per_token
            kept.append(KeptStates(ImageSource(shape, CPU, members[rank]), most))
        sent = 0
        for step in steps:
            before, plan = set(kept[0].numbers), seeing(*step)
            told = [plan, decode_plan(Frame(memoryview(encode_plan(plan))))]
            found = together(partial(find, kept, told))
            sent += len(set(kept[0].numbers) - before)
            assert kept[0].numbers == kept[1].numbers
            assert len(kept[0].numbers) <= max(room, len({each for row in step for each in row}))
            for rank, rows in enumerate(found):
                check(rank, plan, rows)
    assert sent == handed
    assert all(each.bytes_to_come == most // 2 for each in kept), "half of the heads are its own"
