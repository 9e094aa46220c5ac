"""What other requests bring along, beside images: grammars, drafts, preemption, several ranks.

A family for each way in which images change a prompt: not at all but for features, by spans that
see themselves, by rotary positions; and one that keeps states, one whose layers differ.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.shard.image_support import Told
from tests.shard.media.images_support import NEW, Golden, Maker, Shard, arena
from tests.shard.media.pictures import CROSSED, Prompt
from tests.shard.ranks.rank_processes import ranks_of
from tests.shard.torch_backend.models_support import BLOCK, GreedyRecorder, generated, load
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.model.config import read_config
from tgi_trio.shard.contract import ShardSequence
from tgi_trio.shard.torch_backend.sampling.torch_sampler import Sampler
from tgi_trio.shard.torch_backend.torch_loading import load_torch_runner
from tgi_trio.testing.checkpoints import VOCAB_SIZE

pytestmark = pytest.mark.usefixtures("one_thread")
FAMILIES = ("gemma3", "gemma4", "llava", "qwen2_vl", "qwen3_5")


class OddThenEven:
    """Grammars of one kind: odd and even tokens take turns."""

    def start(self) -> None: ...

    def prepare(self, sequence: ShardSequence) -> bool:
        return True

    def drop(self, sequence: ShardSequence) -> None: ...

    def rewind(self, sequence: ShardSequence) -> None: ...

    def pieces(self, ids: NDArray[np.int64]) -> list[bytes]:
        raise ValueError("no row fills a gap here")

    def allowed(self, sequences: list[ShardSequence]) -> tuple[np.ndarray, dict[int, str]]:
        rows = np.stack([fitting(row.length - row.prompt_length) for row in sequences])
        return np.packbits(rows, axis=1, bitorder="little"), {}


def fitting(said: int) -> np.ndarray:
    return np.arange(VOCAB_SIZE) % 2 != said % 2


def write(golden: Golden, prompt: Prompt, *, by_grammar: bool) -> list[int]:
    """Return the whole model's tokens, one pass over everything for each."""
    tokens: list[int] = []
    for said in range(NEW):
        scores = golden.logits(prompt, [*tokens, 0])[-1]
        if by_grammar:
            scores = scores.masked_fill(~torch.from_numpy(fitting(said)), -torch.inf)
        tokens.append(int(scores.argmax()))
    return tokens


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_grammars_and_drafts(model: Maker, family: str) -> None:
    """Drafts are right two times of three, and a wrong one fits no grammar."""
    own = model(family)
    prompts = own.prompts()
    expected = [write(own.golden, each, by_grammar=i % 2 == 0) for i, each in enumerate(prompts)]
    assert expected[0] != write(own.golden, prompts[0], by_grammar=False)
    sampler = Sampler(VOCAB_SIZE, [], torch.device("cpu"), grammars=OddThenEven())
    settings = ShardSettings(model_path=own.folder, speculate=2)
    runner = load_torch_runner(settings, read_config(settings.model_path), sampler=sampler)
    runner.warm_up(WarmupRequest(64, 256, 16, 100 * BLOCK))
    told = Told(expected, prompts)
    with arena() as memory:
        shard = Shard(runner, own.tower, memory, rules=own.rules, drafter=told)
        rows = [
            shard.add(i, each, grammar="" if i % 2 else "odd then even")
            for i, each in enumerate(prompts)
        ]
        shard.run(30)
    assert [generated(row) for row in rows] == expected
    assert shard.drafted


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", [*FAMILIES, "qwen4_exp", *CROSSED])
def test_preempted_at_any_step(model: Maker, family: str) -> None:
    """Its prompt is half computed, or it has said something: it begins anew, beside another."""
    own = model(family)
    runner, recorder = load(own.folder)
    prompt, other = own.prompts()[1], own.prompts()[3]
    silent = Told([[]] * 6, [prompt, other] * 3)  # so that steps bring a token each
    budget = 2 if family in CROSSED else 5  # less than the prompt, whose images are a token each
    with arena() as memory:
        shard = Shard(runner, own.tower, memory, rules=own.rules, drafter=silent)
        for number, words in enumerate((0, 1, 4)):
            row, neighbour = shard.add(2 * number, prompt), shard.add(2 * number + 1, other)
            while not row.computed or len(generated(row)) < words:
                assert shard.step(budget)
            said = generated(row)
            assert len(said) == words and row.computed < len(prompt.ids) + words
            shard.drop(row.id)
            again = shard.add(row.id, prompt, said=said)
            shard.run(5)
            own.golden.check(other, neighbour, recorder)
            own.golden.check(prompt, again, recorder, words)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", [*FAMILIES, "minimax_m3_vl", "qwen4_exp", *CROSSED])
def test_two_ranks(model: Maker, family: str) -> None:
    """Rank 0 alone has a tower; the others are sent features, turns and what is seen."""
    own, recorder = model(family), GreedyRecorder()
    with ranks_of(own.folder, 2, recorder) as ranks, arena() as memory:
        ranks.warm_up(WarmupRequest(64, 256, 16, 100 * BLOCK))
        shard = Shard(ranks, own.tower, memory, rules=own.rules)
        prompts = own.prompts()
        rows = [shard.add(i, each) for i, each in enumerate(prompts)]
        shard.run(7)
        for each, row in zip(prompts, rows, strict=True):
            own.golden.check(each, row, recorder)
