"""Families with states say what transformers says, cut anywhere and in any company."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from tests.shard.torch_backend.models_support import (
    Golden,
    assert_greedy,
    generated,
    prompts,
    run,
    sequences,
)
from tests.shard.torch_backend.states.stateful_decoder import StatefulDecoder, read_spec
from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families import linear_attention
from tgi_trio.model.spec import DecoderSpec
from tgi_trio.shard.contract import Runner

pytestmark = pytest.mark.usefixtures("one_thread")

HYBRIDS: dict[str, Callable[[ModelConfig], DecoderSpec | None]] = {
    "qwen3_next": linear_attention.qwen3_next,
    "qwen3_5_text": linear_attention.qwen3_5,
    "qwen3_5_moe_text": linear_attention.qwen3_5_moe,
}
NEW = 10
TOLERANCE = 1e-3  # states of random weights amplify rounding; logits go up to 18
LONG = [token for prompt in prompts(8, seed=3) for token in prompt]  # of more than two chunks
PROMPTS = [*prompts(6)[1:], LONG]


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_hybrid(checkpoint: Callable[..., Path], family: str) -> None:
    folder = checkpoint(family)
    golden, spec = Golden(folder), read_spec(folder, HYBRIDS[family])
    runner = StatefulDecoder(folder, spec)
    rows = sequences(PROMPTS, shuffle=3, new=NEW)
    run(cast(Runner, runner), rows, chunk=40, joins=2)
    for row in rows:
        assert_greedy(golden, runner.recorder, row, TOLERANCE)
    assert len({tuple(generated(row)) for row in rows}) == len(rows)
