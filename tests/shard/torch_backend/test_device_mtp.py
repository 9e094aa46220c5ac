"""A layer of the model's own drafts between two recorded steps, on a stand-in device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.shard.speculation.mtp_support import counting, mtp_checkpoint
from tests.shard.torch_backend.interpreter import need_triton

need_triton()

from tests.shard.torch_backend.stand_in_support import agree, drive, start  # noqa: E402
from tgi_trio.shard.torch_backend.attention.paged import split_kv  # noqa: E402
from tgi_trio.testing.stand_in_device import StandInDevice  # noqa: E402

TEXTS = [[5, 6, 7, 8, 9], [40, 41, 42]]
ASKED: list[dict[str, Any]] = [{}, {}]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["deepseek_v4", "glm4_moe", "hy_v4", "step3p5"])
def test_its_drafts_are_those_of_the_cpu(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split_kv, "_PROGRAMS", 4)  # an interpreter has but one
    folder = counting(mtp_checkpoint(tmp_path, family, tie_word_embeddings=False))
    settings: dict[str, Any] = {"drafter": "mtp", "speculate": 2}
    host = start(folder, "cpu", **settings)
    expected = drive(host, TEXTS, ASKED, 6, drafter=host.drafter(2), late=0)
    with StandInDevice():
        runner = start(folder, "cuda:0", (2, 6), **settings)
        ours = drive(runner, TEXTS, ASKED, 6, drafter=runner.drafter(2), late=0)
    agree(ours, expected)
    assert ours.drafts == expected.drafts > 2 and ours.steps == expected.steps < 6
