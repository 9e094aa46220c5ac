"""Images where an index chooses the tokens that others attend to: several of each image.

Blocks of the index begin in texts, in images and in other steps than they end in.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from tests.shard.cpu_backend.kernel_support import GLM5, QWEN4, cpu_runner
from tests.shard.media.images_support import Maker, Model, Shard, arena
from tests.shard.media.pictures import Prompt, picture
from tests.shard.torch_backend.models_support import BLOCK, GreedyRecorder, load
from tgi_trio.ipc.messages import StateGrant

pytestmark = pytest.mark.usefixtures("one_thread")
FAMILIES = ("glm5_next", "minimax_m3_vl", "qwen4_exp")
SIZES = {"qwen4_exp": QWEN4 | {"head_dim": 32}, "glm5_next": GLM5}  # for the CPU kernels
SMALL = "mistral_large4"  # whose image here is two tokens


def prompts(family: str) -> list[Prompt]:
    """Return prompts with an image at the start, in the middle and at the end."""
    one, two = (picture(family, seed) for seed in (1, 2))
    return [
        Prompt.of(one, *range(20, 43), two, *range(60, 78)),
        Prompt.of(*range(5, 15), two, 8, one, 9, two, *range(30, 47), one),
    ]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("budget", [3, 1000])
@pytest.mark.parametrize("family", [*FAMILIES, SMALL])
def test_tokens_of_images_are_chosen_as_others_are(model: Maker, family: str, budget: int) -> None:
    own = model(family)
    runner, recorder = load(own.folder)
    with arena() as memory:
        shard = Shard(runner, own.tower, memory, rules=own.rules)
        rows = [shard.add(i, prompt) for i, prompt in enumerate(prompts(family))]
        shard.run(budget)
    for prompt, row in zip(prompts(family), rows, strict=True):
        own.golden.check(prompt, row, recorder)


@pytest.mark.parametrize(
    ("family", "kernels"),
    [*((each, False) for each in FAMILIES), ("qwen4_exp", True), ("glm5_next", True)],
)
def test_what_an_image_of_a_prefix_turned_is_kept(model: Maker, family: str, kernels: bool) -> None:
    """A block of the index begins in the prefix, in an image's tokens, and ends behind it."""
    own = model(family, **SIZES[family]) if kernels else model(family)
    with cpu_runner(own.folder) if kernels else nullcontext(load(own.folder)) as pair:
        check_prefix(own, *pair)


def check_prefix(own: Model, runner: Any, recorder: GreedyRecorder) -> None:
    family = own.family
    image, begin = picture(family, 1), range(5, 5 + 2 * BLOCK - 5)
    first = Prompt.of(*begin, image, *range(40, 60))  # the image ends behind the second block
    granted = StateGrant((1, 2), saves=((2 * BLOCK, 3),))
    with arena() as memory:
        shard = Shard(runner, own.tower, memory, rules=own.rules)
        row = shard.add(0, first, states=granted if shard.keeps_states else None)
        shard.run(7)
        own.golden.check(first, row, recorder)
        for id, prompt in enumerate((first, Prompt.of(*begin, image, *range(70, 90))), start=1):
            states = StateGrant((2 + 2 * id, 3 + 2 * id), source=3) if shard.keeps_states else None
            kept = row.block_ids[:2]
            again = shard.add(id, prompt, blocks=kept, cached=2 * BLOCK, states=states)
            shard.run()
            own.golden.check(prompt, again, recorder)
        assert shard.tower.encoded == 1
