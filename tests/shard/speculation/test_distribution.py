"""Whoever drafts, tokens are drawn as often as the model's probabilities say, in any order.

Thousands of short texts of a few likely tokens, each with a seed of its own, are counted, and
compared with what transformers' logits and a plain float64 sampler say of all such texts.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as ListLike
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.shard.moved_tokens import tokens_of
from tests.shard.sampling.sampling_oracle import processed_logprobs
from tests.shard.speculation.eagle_support import eagle
from tests.shard.speculation.heads_support import BLOCK, BUDGET, Answers, medusa, start
from tests.shard.torch_backend.golden import Golden
from tgi_trio.ipc.messages import PrefillRow, SamplingParameters
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.router.text.tokenizer import Tokenizer
from tgi_trio.shard.backend import load_runner
from tgi_trio.shard.contract import ShardSequence
from tgi_trio.shard.runner import Runner
from tgi_trio.testing.checkpoints import VOCAB_SIZE, make_checkpoint

EOS: Final = 1
HIDDEN, NEW, MOST = 64, 4, 3
DRAWS: Final = 240  # texts of each setting
BESIDE: Final = 4  # sequences at a time: of more on a CPU no step has room for drafts
LETTERS: Final = frozenset("abcdefghijklm ")
_GRAMMAR: Final = '{"grammars": [{"lark_grammar": "start: /[a-m ]+/"}]}'
_SAID: Final = 4  # tokens of which all texts are made, but for one in a million

SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "temperature": {"temperature": 1.6},
    "top-k": {"top_k": 4, "temperature": 1.4},
    "top-p": {"top_p": 0.8, "temperature": 1.7},
    "typical-p": {"typical_p": 0.7, "temperature": 1.7},
    "min-p": {"min_p": 0.1, "temperature": 1.7},
    "penalties": {
        **{"repetition_penalty": 1.02, "frequency_penalty": 0.8, "presence_penalty": 0.3},
        "temperature": 1.6,
    },
    "OpenAI's penalties": {
        **{"frequency_penalty": 0.9, "presence_penalty": -0.4, "absolute_penalties": True},
        "temperature": 1.6,
    },
    "grammar": {"grammar": _GRAMMAR, "temperature": 1.6},
    "all of them": {
        **{"temperature": 1.9, "top_k": 5, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.98},
        **{"frequency_penalty": 0.6, "presence_penalty": 0.2, "grammar": _GRAMMAR},
    },
}
DRAFTERS: Final[Mapping[str, tuple[str, Callable[[Path, Path], Path] | None]]] = {
    "n-grams": ("kernels", None),
    "medusa": (
        "kernels",
        lambda folder, base: medusa(folder, base, HIDDEN, VOCAB_SIZE, layers=1, own=False),
    ),
    "eagle": ("torch", lambda folder, base: eagle(folder, base, VOCAB_SIZE)),
    "model": (  # which is the model itself, so most drafts of likely tokens are right
        "kernels",
        lambda folder, base: make_checkpoint(folder, "llama", head_dim=32),
    ),
}


class World:
    """A model, the tokens that it mostly says, and what should be drawn how often."""

    def __init__(self, folder: Path) -> None:
        self.folder = make_checkpoint(folder, "llama", head_dim=32)
        self._golden = Golden(folder)
        self._known: dict[tuple[int, ...], NDArray[np.float32]] = {}  # logits by what is said
        tokenizer = Tokenizer.from_folder(folder)
        texts = {i: tokenizer.token_text(i) for i in range(VOCAB_SIZE)}
        fitting = [i for i, text in texts.items() if text and LETTERS.issuperset(text)]
        others = [i for i in range(259, VOCAB_SIZE) if i not in fitting]
        self._fitting = set(fitting)
        said = [*fitting[40 : 40 + _SAID - 1], others[10]]
        self._bias = tuple(sorted((i, 50.0) for i in said))
        # What n-grams find something in, whichever of them are said.
        self.prompt = [said[i] for i in (0, 1, 2, 0, 2, 1, 3, 0, 3, 1, 0, 1, 2, 3)]

    def asked(self, name: str, seed: int) -> SamplingParameters:
        given = {**SETTINGS[name], "logit_bias": self._bias}
        return SamplingParameters(sample=True, seed=seed, **given)

    def expected(self, name: str) -> dict[tuple[int, ...], float]:
        """Return the probability of each text of NEW tokens that is at all likely."""
        found: dict[tuple[int, ...], float] = {(): 1.0}
        for _ in range(NEW):
            longer: dict[tuple[int, ...], float] = {}
            for said, chance in found.items():
                for token, logprob in self._next(name, said).items():
                    if (more := chance * np.exp(logprob)) > 1e-7:
                        longer[*said, token] = more
            found = longer
        return found

    def _next(self, name: str, said: tuple[int, ...]) -> dict[int, float]:
        """Return log-probabilities of what may follow."""
        tokens = [*self.prompt, *said]
        row = ShardSequence(
            id=1,
            token_ids=np.array(tokens, np.int32),
            length=len(tokens),
            prompt_length=len(self.prompt),
            computed=len(tokens) - 1,
            block_ids=[1],
            remaining=NEW,
            min_remaining=0,
            sampling=self.asked(name, 0),
        )
        logits = self._logits(said)
        if row.sampling.grammar:
            logits = logits.copy()
            banned = sorted(set(range(VOCAB_SIZE)) - self._fitting - {EOS})
            logits[banned] = -1e6
        return processed_logprobs(logits, row, EOS)

    def _logits(self, said: tuple[int, ...]) -> NDArray[np.float32]:
        if said not in self._known:
            ids = torch.tensor([[*self.prompt, *said]])
            with torch.no_grad():
                self._known[said] = self._golden.model(input_ids=ids).logits[0, -1].numpy()
        return self._known[said]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def chances(world: World) -> dict[str, dict[tuple[int, ...], float]]:
    return {name: world.expected(name) for name in SETTINGS}


def far_off(seen: Counter[tuple[int, ...]], chances: Mapping[tuple[int, ...], float]) -> float:
    """Return how far counts are from what is due, in the largest chi-square that may come."""
    draws = seen.total()
    texts = sorted(chances, key=lambda text: -chances[text])
    due = np.array([chances[text] for text in texts]) * draws
    counts = np.array([seen[text] for text in texts])
    rest = draws - counts.sum()  # texts that are hardly ever said
    assert rest <= 3 + 3 * max(0.0, draws - due.sum())
    group = (np.cumsum(due) // 20).astype(int)
    counted, wanted = np.bincount(group, counts), np.bincount(group, due)
    counted, wanted = counted[wanted > 5], wanted[wanted > 5]
    freedom = len(wanted)
    assert freedom > 5
    most = freedom + 6 * np.sqrt(2 * freedom) + 6
    return float(((counted - wanted) ** 2 / wanted).sum() / most)


def draw(
    runner: Runner, prompt: ListLike[int], asked: ListLike[SamplingParameters], most: int
) -> Answers:
    """Return the texts that are drawn, as `answer`, of few sequences at a time; `most`: drafts."""
    batch = start(runner, 64, runner.drafter(most) if most else None)
    found, left, places = Answers({}), deque(enumerate(asked)), dict[int, int]()
    need = -(-(len(prompt) + NEW + 8) // BLOCK)
    while True:
        free = [place for place in range(BESIDE) if place not in places.values()]
        for place in free[: len(left)]:
            number, own = left.popleft()
            places[number], found.tokens[number] = place, []
            blocks = range(1 + place * need, 1 + (place + 1) * need)
            ids = np.array(prompt, np.int32)
            sequence = batch.add(PrefillRow(number, ids, len(prompt), 0, blocks, NEW, 0, own))
            while own.grammar and not runner.prepare(sequence):
                time.sleep(0.001)
        if (plan := batch.plan(BUDGET)) is None:
            return found
        found.drafts += batch.counts.draft_tokens
        # No step says how long it took: drafting does not rest for what it costs here.
        result = replace(runner.step(plan), forward_ns=0, sample_ns=0, processor_ns=0)
        moved = batch.settle(plan, result)
        assert not moved.faults, moved.faults
        for number, token_ids in tokens_of(moved):
            found.tokens[number] += token_ids
        for gone in moved.dropped:
            runner.drop(gone)
            del places[gone.id]


@pytest.mark.sampled(3, first=1)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_texts_are_drawn_as_often_as_the_model_says(
    kind: str, world: World, chances: dict[str, dict[tuple[int, ...], float]], tmp_path: Path
) -> None:
    """And each is that of its seed without drafts."""
    backend, make = DRAFTERS[kind]
    settings = ShardSettings(
        model_path=world.folder,
        draft_model=None if make is None else make(tmp_path, world.folder),
        cpu_backend=backend,
        cpu_threads=1,
        dtype="float32",
        tokenizer_file=world.folder / "tokenizer.json",
    )
    runner = load_runner(settings)
    every = list(np.random.default_rng(1).permutation([*SETTINGS] * DRAWS))
    asked = [world.asked(name, seed) for seed, name in enumerate(every, start=1000)]
    found = draw(runner, world.prompt, asked, MOST)
    assert found.drafts > len(every) / 8
    few = len(every) // 8
    assert draw(runner, world.prompt, asked[:few], 0).tokens == {
        number: found.tokens[number] for number in range(few)
    }
    counts = {name: Counter[tuple[int, ...]]() for name in SETTINGS}
    for number, name in enumerate(every):
        counts[name][tuple(found.tokens[number])] += 1
    far = {name: far_off(counts[name], chances[name]) for name in SETTINGS}
    assert max(far.values()) < 1, far
