"""Towers over the stand-in device, and texts whose index chooses among images' tokens.

How attention to images is recorded is test_recorded_images.py's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.shard.media.images_support import Maker, Shard, arena
from tests.shard.media.pictures import picture
from tests.shard.media.test_indexed_images import prompts
from tests.shard.torch_backend.interpreter import need_triton
from tests.shard.torch_backend.models_support import BLOCK, generated

need_triton()

from tests.shard.torch_backend.stand_in_support import start  # noqa: E402  (it imports Triton)
from tgi_trio.shard.media.tower import load_tower  # noqa: E402
from tgi_trio.shard.torch_backend.attention.paged import split_kv  # noqa: E402
from tgi_trio.testing.stand_in_device import StandInDevice  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
NEW = 3


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "family",
    [
        *("deepseek_vl_hybrid", "exaone4_5", "fast_vlm", "gemma3n", "gemma4_unified"),
        *(
            "granite4_vision",
            "hunyuan_vl",
            "kimi_k25",
            "llava_onevision",
            "minicpmv4_6",
            "minimax_m3_vl",
        ),
        *("muse_glimmer", "ovis2", "paddleocr_vl", "perception_lm", "qwen2_5_vl", "qwen4_exp"),
        "step3p7",
    ],
)
def test_a_tower_finds_what_it_finds_on_the_cpu(model: Maker, family: str) -> None:
    own, image = model(family), picture(family, 1)
    expected = own.tower.encode(image.bundle)
    with StandInDevice():
        with torch.inference_mode():  # the stand-in makes no views of parameters there
            tower = load_tower(own.folder, family, torch.device("cuda:0"), torch.float32)
        found = tower.encode(image.bundle)
    assert found.deep.keys() == expected.deep.keys()
    pairs = zip(found.deep.values(), expected.deep.values(), strict=True)
    for rows, wanted in ((found.rows, expected.rows), *pairs):
        largest = max(1.0, float(np.abs(wanted).max()))
        np.testing.assert_allclose(rows / largest, wanted / largest, atol=1e-4)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("family", ["minimax_m3_vl", "qwen4_exp"])
def test_texts_are_those_of_transformers(
    model: Maker, monkeypatch: pytest.MonkeyPatch, family: str, which: int
) -> None:
    """Blocks of the index begin in images, and end in recorded decodes."""
    monkeypatch.setattr(split_kv, "_PROGRAMS", 4)  # an interpreter has but one
    own, prompt = model(family), prompts(family)[which]
    expected = own.golden.generate(prompt, NEW)
    with StandInDevice(), arena() as pixels:
        runner: Any = start(own.folder, "cuda:0", (1,))
        shard = Shard(runner, own.tower, pixels, rules=own.rules)
        row = shard.add(0, prompt, NEW)
        shard.run(15)
        turns = runner._cache.turns
        slots = (torch.tensor(row.block_ids)[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
        kept = None if turns is None else turns.cpu()[slots[: row.length - 1]]
    assert generated(row) == expected
    if kept is not None:  # and the text behind images goes on from their largest
        assert kept[-1].tolist() == [int(kept[-2].max()) + 1] * 3 and len(kept.unique(dim=1)[0]) > 1


@pytest.mark.thorough
def test_images_turn_by_four_parts_beside_recorded_decodes(model: Maker) -> None:
    own = model("hunyuan_vl")
    prompts = own.prompts()[:2]
    expected = [own.golden.generate(prompt, NEW) for prompt in prompts]
    with StandInDevice(), arena() as pixels:
        runner: Any = start(own.folder, "cuda:0", (1, 2))
        shard = Shard(runner, own.tower, pixels, rules=own.rules)
        rows = [shard.add(i, prompt, NEW) for i, prompt in enumerate(prompts)]
        shard.run(15)
    assert [generated(row) for row in rows] == expected
