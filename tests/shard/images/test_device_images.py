"""Towers over the stand-in device, and texts whose index chooses among images' tokens.

How attention to images is recorded is test_recorded_images.py's.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.shard.images.images_support import Maker, Shard, arena
from tests.shard.images.pictures import Prompt, picture
from tests.shard.torch_backend.interpreter import need_triton
from tests.shard.torch_backend.models_support import generated

need_triton()

from tests.shard.torch_backend.stand_in_support import start  # noqa: E402  (it imports Triton)
from tgi_trio.shard.images.tower import load_tower  # noqa: E402
from tgi_trio.shard.torch_backend.attention import paged  # noqa: E402
from tgi_trio.testing.stand_in_device import StandInDevice  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
NEW = 3


@pytest.mark.parametrize(
    "family", ["kimi_k25", "minimax_m3_vl", "muse_glimmer", "qwen2_5_vl", "qwen4_exp", "step3p7"]
)
def test_a_tower_finds_what_it_finds_on_the_cpu(model: Maker, family: str) -> None:
    own, image = model(family), picture(family, 1)
    expected = own.tower.encode(image.bundle).rows
    with StandInDevice():
        with torch.inference_mode():  # the stand-in makes no views of parameters there
            tower = load_tower(own.folder, family, torch.device("cuda:0"), torch.float32)
        found = tower.encode(image.bundle).rows
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("family", ["minimax_m3_vl", "qwen4_exp"])
def test_texts_are_those_of_transformers(
    model: Maker, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setattr(paged, "_PROGRAMS", 4)  # an interpreter has but one
    own = model(family)
    one, two = (picture(family, seed) for seed in (1, 2))
    prompt = Prompt.of(5, one, *range(6, 20), two, 8)
    expected = own.golden.generate(prompt, NEW)
    with StandInDevice(), arena() as pixels:
        shard = Shard(start(own.folder, "cuda:0", (1,)), own.tower, pixels, rules=own.rules)
        row = shard.add(0, prompt, NEW)
        shard.run(15)
    assert generated(row) == expected
