"""Families that transformers has not say over the stand-in device what they say on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.shard.torch_backend.interpreter import need_triton
from tests.shard.torch_backend.models_support import BLOCK, prompts
from tests.shard.torch_backend.own_names import CASES, Checkpoint, make_case

need_triton()

from tests.shard.torch_backend.stand_in_support import (  # noqa: E402  (it imports Triton)
    FallingTimes,
    agree,
    drive,
    start,
)
from tgi_trio.shard.torch_backend import device_parts  # noqa: E402
from tgi_trio.shard.torch_backend.attention.paged import split_kv  # noqa: E402
from tgi_trio.testing.stand_in_device import StandInDevice  # noqa: E402

TEXTS = prompts(2, longest=2 * BLOCK)
ASKED: list[dict[str, Any]] = [{}, {}]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", CASES)
def test_it_says_what_it_says_on_the_cpu(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(split_kv, "_PROGRAMS", 4)  # an interpreter has but one
    monkeypatch.setattr(device_parts, "RecordedTime", FallingTimes)
    own = make_case(name, checkpoint, tmp_path)[1]
    expected = drive(start(own, "cpu"), TEXTS, ASKED, 3)
    with StandInDevice() as device:
        runner = start(own, "cuda:0", (1, 2))
        ours = drive(runner, TEXTS, ASKED, 3, device=device)
    agree(ours, expected)
    assert ours.decodes and all(counts.replays == 1 for counts in ours.decodes)
