"""Models with images against transformers' whole ones: tokens and logits, in every order of steps.

Towers are transformers' own, the text is computed by us.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.shard.images.images_support import (
    FAMILIES,
    NEW,
    Golden,
    Prompt,
    Shard,
    arena,
    make_folder,
    picture,
)
from tests.shard.numba_backend.numba_support import cpu_runner
from tests.shard.ranks.rank_processes import ranks_of
from tests.shard.torch_backend.models_support import BLOCK, GreedyRecorder, generated, load
from tgi_trio.ipc.messages import StateGrant
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.model.config import read_config
from tgi_trio.model.image_rules import ImageRules, image_rules
from tgi_trio.shard.contract import Runner
from tgi_trio.shard.images.tower import TorchTower, load_tower

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass
class Model:
    """A family's checkpoint, as transformers and as we have it."""

    family: str
    folder: Path
    golden: Golden
    tower: TorchTower
    rules: ImageRules

    def prompts(self) -> list[Prompt]:
        """Return prompts that share steps: an image alone, two, none, the same one twice."""
        one, two = (picture(self.family, seed) for seed in (1, 2))
        return [
            Prompt.of(5, 6, 7, one, 8, 9),
            Prompt.of(one, 20, two, 21),
            Prompt.of(*range(5, 40)),
            Prompt.of(9, two, 12, two, 11),
        ]


Maker = Callable[..., Model]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    made: dict[str, Model] = {}

    def make(family: str, **text: int) -> Model:
        if (name := repr((family, text))) not in made:
            folder = make_folder(tmp_path_factory.mktemp(family), family, **text)
            config, device = read_config(folder), torch.device("cpu")
            tower = load_tower(folder, config.model_type, device, torch.float32)
            rules = image_rules(config)
            made[name] = Model(family, folder, Golden(folder), tower, rules)
        return made[name]

    return make


def check(model: Model, runner: Runner, recorder: GreedyRecorder, budget: int = 1000) -> Shard:
    with arena() as memory:
        shard = Shard(runner, model.tower, memory, rules=model.rules)
        prompts = model.prompts()
        rows = [shard.add(i, prompt) for i, prompt in enumerate(prompts)]
        shard.run(budget)
        for prompt, row in zip(prompts, rows, strict=True):
            model.golden.check(prompt, row, recorder)
    assert len({tuple(generated(row)) for row in rows}) == len(rows)
    assert shard.seen == [(0, 0), (1, 0), (1, 1), (3, 0), (3, 1)]
    assert shard.tower.encoded == 2, "the features of an image are computed once"
    return shard


@pytest.mark.parametrize("budget", [5, 1000])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_logits_are_those_of_the_whole_model(
    model: Maker, family: str, budget: int
) -> None:
    own = model(family)
    runner, recorder = load(own.folder)
    assert runner.info.backend != "transformers"
    shard = check(own, runner, recorder, budget)
    if own.rules.sight != "prompt":  # of which no step may compute a part
        assert max(shard.pieces) <= budget, "images are cut, or end a step"


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_says_the_same(model: Maker, family: str) -> None:
    own = model(family)
    runner, _ = load(own.folder)
    prompt = own.prompts()[1]
    with arena() as memory:
        shard = Shard(runner, own.tower, memory, rules=own.rules)
        row = shard.add(0, prompt)
        shard.run()
    assert generated(row) == own.golden.generate(prompt)


def test_the_cpu_kernels(model: Maker) -> None:
    own = model("idefics3", head_dim=32)
    with cpu_runner(own.folder) as (runner, recorder):
        check(own, runner, recorder)
        check(own, runner, recorder, 5)


def test_two_ranks(model: Maker) -> None:
    """Rank 0 alone has a tower."""
    own, recorder = model("llava"), GreedyRecorder()
    with ranks_of(own.folder, 2, recorder) as ranks:
        ranks.warm_up(WarmupRequest(64, 256, 16, 100 * BLOCK))
        check(own, ranks, recorder, 7)


@pytest.fixture
def llava(model: Maker) -> Iterator[tuple[Model, Shard, GreedyRecorder]]:
    own = model("llava")
    runner, recorder = load(own.folder)
    with arena() as memory:
        yield own, Shard(runner, own.tower, memory), recorder


def test_a_prefix_with_an_image_is_read_from_the_cache(
    llava: tuple[Model, Shard, GreedyRecorder],
) -> None:
    """Whole images in it are not computed again, and one that it cuts gives its other features."""
    own, shard, recorder = llava
    image = picture("llava", 1)
    first = Prompt.of(*range(5, 19), image, 50, 51)  # 14 tokens, so the block ends in the image
    row = shard.add(0, first)
    shard.run()
    encoded = shard.tower.encoded
    for id, prompt in enumerate((first, Prompt.of(*range(5, 19), image, 60)), start=1):
        again = shard.add(id, prompt, blocks=row.block_ids[:1], cached=BLOCK)
        shard.run()
        own.golden.check(prompt, again, recorder)
    assert shard.tower.encoded == encoded
    long = Prompt.of(*range(5, 14), image, *range(30, 40))
    row = shard.add(3, long)
    shard.run()
    again = shard.add(4, long, blocks=row.block_ids[:1], cached=BLOCK)
    assert shard.desk.seen == [(4, 0)] and 4 not in shard.desk, "it needs no feature"
    shard.run()
    own.golden.check(long, again, recorder)


def test_a_replay_begins_with_what_was_said(llava: tuple[Model, Shard, GreedyRecorder]) -> None:
    """As after a preemption, or the death of a shard: prompt and tokens are computed anew."""
    own, shard, _ = llava
    prompt = own.prompts()[1]
    row = shard.add(0, prompt)
    shard.run()
    whole = generated(row)
    longer = Prompt([*prompt.ids, *whole[:3]], prompt.pictures)
    again = shard.add(1, longer, NEW - 3)
    shard.run(5)
    assert whole[:3] + generated(again) == whole


def test_guesses_change_nothing(llava: tuple[Model, Shard, GreedyRecorder]) -> None:
    own, shard, recorder = llava
    image = picture("llava", 3)
    prompt = Prompt.of(*[7, 8, 9] * 6, image, *[7, 8, 9] * 4)
    row = shard.add(0, prompt, 16)
    plain = shard.add(1, prompt, 16, top_n=1)
    shard.run()
    own.golden.check(prompt, row, recorder)
    assert generated(row) == generated(plain)


@pytest.mark.parametrize("boundary", [BLOCK, 3 * BLOCK])
def test_a_hybrid_goes_on_behind_a_snapshot_with_images(model: Maker, boundary: int) -> None:
    """The first boundary is within the image, whose other features are given then."""
    own = model("qwen3_5")
    runner, recorder = load(own.folder)
    image = picture(own.family, 1)
    with arena() as memory:
        shard = Shard(runner, own.tower, memory, rules=own.rules)
        first = Prompt.of(*range(5, 17), image, *range(20, 60))  # tokens 12 to 17 are the image's
        row = shard.add(0, first, states=StateGrant((1, 2), saves=((boundary, 3),)))
        shard.run(7)
        own.golden.check(first, row, recorder)
        kept = row.block_ids[: boundary // BLOCK]
        prompts = (first, Prompt([*first.ids[:boundary], 70, 71, 72], (image,)))
        for id, prompt in enumerate(prompts[: 1 + (boundary > BLOCK)], start=1):
            grant = StateGrant((2 + 2 * id, 3 + 2 * id), source=3)
            again = shard.add(id, prompt, blocks=kept, cached=boundary, states=grant)
            shard.run()
            own.golden.check(prompt, again, recorder)
        assert shard.tower.encoded == 1


def test_guesses_of_a_hybrid_behind_images(model: Maker) -> None:
    """Wrong ones are undone in states as well."""
    own = model("qwen3_5")
    runner, recorder = load(own.folder, speculate=2)
    with arena() as memory:
        shard = Shard(runner, own.tower, memory, rules=own.rules)
        image = picture(own.family, 3)
        prompt = Prompt.of(*[7, 8, 9] * 6, image, *[7, 8, 9] * 4)
        row, plain = shard.add(0, prompt, 16), shard.add(1, prompt, 16, top_n=1)
        shard.run()
        own.golden.check(prompt, row, recorder)
    assert generated(row) == generated(plain)
