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
from tgi_trio.model.families import linear_attention, state_spaces
from tgi_trio.model.families.registry import FAMILIES, SpecFunction
from tgi_trio.shard.contract import Runner
from tgi_trio.testing import tiny_hybrids

pytestmark = pytest.mark.usefixtures("one_thread")

HYBRIDS: dict[str, SpecFunction] = {
    "qwen3_next": linear_attention.qwen3_next,
    "qwen3_5_text": linear_attention.qwen3_5,
    "qwen3_5_moe_text": linear_attention.qwen3_5_moe,
    "kimi_linear": linear_attention.kimi_linear,
    "granitemoehybrid": state_spaces.granite_hybrid,
    "nemotron_h": state_spaces.nemotron_h,
    "bamba": state_spaces.bamba,
}
NEW = 10
TOLERANCE = 1e-3  # states of random weights amplify rounding; logits go up to 18
LONG = [token for prompt in prompts(8, seed=3) for token in prompt]  # of more than two chunks
PROMPTS = [*prompts(6)[1:], LONG]


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_hybrid(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setitem(FAMILIES, family, HYBRIDS[family])
    folder = checkpoint(family, **tiny_hybrids.FAMILIES[family])
    golden, spec = Golden(folder), read_spec(folder)
    runner = StatefulDecoder(folder, spec)
    rows = sequences(PROMPTS, shuffle=3, new=NEW)
    run(cast(Runner, runner), rows, chunk=40, joins=2)
    for row in rows:
        assert_greedy(golden, runner.recorder, row, TOLERANCE)
    assert len({tuple(generated(row)) for row in rows}) == len(rows)
