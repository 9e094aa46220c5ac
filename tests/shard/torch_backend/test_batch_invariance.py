"""Batch invariance over the stand-in device: a sequence has the same bits alone and in a crowd.

Neither how many rows a step has, nor into which chunks a prompt is cut, nor in which blocks a
sequence lies, nor whether a step is recorded changes a number.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.shard.torch_backend.interpreter import need_triton, sum_in_order
from tests.shard.torch_backend.models_support import load, prompts, run, sequences

need_triton()

from tgi_trio.shard.torch_backend.attention import spans  # noqa: E402  (it imports Triton)
from tgi_trio.shard.torch_backend.layers import plain_product  # noqa: E402
from tgi_trio.testing.stand_in_device import StandInDevice  # noqa: E402

Checkpoint = Callable[..., Path]

TEXTS = [*prompts(4)[1:], *prompts(8, longest=40)[6:]]
NEW = 5
FAMILIES = (
    *("llama", "qwen2", "qwen3", "gemma2", "gpt2", "gpt_neox", "bloom", "olmo2", "cohere"),
    *("qwen3_moe", "gpt_oss", "deepseek_v3", "llama4_text", "gemma4_text", "bitnet"),
)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have contexts and inputs of tests divided, as those of large models are."""
    sum_in_order(monkeypatch)
    monkeypatch.setattr(spans, "SPAN", 32)
    monkeypatch.setattr(plain_product, "_LEAST_PART", 32)
    monkeypatch.setattr(plain_product, "_FEW_ROWS", 4)


def logits(runner: Any, recorder: Any, shuffle: int | None, **how: Any) -> list[torch.Tensor]:
    """Return what tokens were chosen from, for each text; `how`: see `run`, alone without."""
    recorder.by_place.clear()
    rows = sequences(TEXTS, shuffle, new=NEW)
    for together in [rows] if how else [[row] for row in rows]:
        run(runner, together, **how)
    return [recorder.logits(row.id) for row in rows]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sequence_has_the_same_logits_alone_and_among_others(
    checkpoint: Checkpoint, family: str
) -> None:
    folder = checkpoint(family)
    with StandInDevice() as device:
        with device.idle():
            runner, recorder = load(
                folder, 64, device="cuda:0", dtype="float32", batch_invariant=True
            )
        alone = logits(runner, recorder, None)
        for how in ({"joins": 5}, {"joins": 2, "chunk": 7}):
            among = logits(runner, recorder, 5, **how)
            assert all(map(torch.equal, among, alone)), how
