"""The step that a warm-up measures: as many tokens as any, prompts and a decode beside them."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tgi_trio.ipc.startup import BLOCK_SIZE, ShardInfo, WarmupRequest
from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.torch_backend.warm_up import WarmSteps, warm_up_plan

INFO = ShardInfo(
    vocab_size=11,
    block_size=BLOCK_SIZE,
    layers=1,
    kv_bytes_per_token=1,
    max_positions=90,
    eos_ids=(),
    dtype="float32",
    device="cuda:0",
    backend="",
    load_ns=0,
)


@given(st.integers(1, 400), st.integers(0, 200))
def test_the_last_row_of_the_largest_step_is_a_decode(tokens: int, total: int) -> None:
    largest = warm_up_plan(WarmupRequest(tokens, total, 4, 1000), INFO, torch.device("cuda:0"))
    assert largest is not None and largest.factor == 1
    plan, counts = largest.plan, np.diff(largest.plan.query_starts)
    assert counts[-1] == 1 and counts.sum() == tokens == len(plan.token_ids)
    assert counts.min() > 0 and counts.max() <= min(tokens, total or tokens, 90)
    assert (counts == plan.context_lengths).all()
    slots = plan.kv_slots
    assert len(set(slots.tolist())) == tokens and slots.max() < largest.blocks * BLOCK_SIZE


def test_short_rows_have_no_more_tokens_than_were_asked_for() -> None:
    rooms: list[int] = []
    lengths: list[int] = []

    def run(plan: StepPlan) -> None:
        assert plan.kv_slots.max() < rooms[-1] * BLOCK_SIZE, "memory is made for each step"
        lengths.append(int(plan.context_lengths.max()))

    warm = WarmSteps(INFO, torch.device("cpu"), rooms.append, run)
    warm.measure(WarmupRequest(200, 80, 4, 1000))
    for total, longest, expected in ((80, 30, 30), (20, 30, 20), (0, 30, 30)):
        warm.run_short(WarmupRequest(200, total, 4, 1000), longest)
        assert lengths[-1] == expected
    assert lengths[0] == 80 and len(rooms) == len(lengths) == 4
