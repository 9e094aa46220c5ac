"""Models whose layers keep states, in the batch that a shard runs: against transformers.

Drafts that prove wrong, steps computed twice, snapshots and sequences that start behind them: the
tokens and what they were chosen from are those of decoding one by one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.shard.moved_tokens import tokens_of
from tests.shard.torch_backend.golden import Golden
from tests.shard.torch_backend.models_support import BLOCK, GreedyRecorder, load, prompts
from tgi_trio.errors import ConfigurationError
from tgi_trio.ipc.messages import PrefillRow, StateGrant
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.model.config import read_config
from tgi_trio.shard.backend import load_runner
from tgi_trio.shard.loop.batch import Batch
from tgi_trio.shard.plan_parts import slice_plan
from tgi_trio.shard.runner import DraftRow, Runner
from tgi_trio.shard.torch_backend.torch_loading import load_torch_runner
from tgi_trio.testing.wrapped_checkpoints import make_wrapped

Checkpoint = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = (
    *("lfm2", "lfm2_moe", "lfm3", "qwen3_5_text", "kimi_linear", "nemotron_h"),
    *("jamba", "mamba", "mamba2", "falcon_h1", "olmo_hybrid", "recurrent_gemma", "zamba2"),
    *("qwen4_exp_text", "bailing_hybrid"),
)
WRAPPED = ("glm5_next",)  # the text of models that see images as well
NEW = 12
PROMPTS = [prompt for prompt in prompts(7) if len(prompt) > 2]
# Without repetitions, where an index would choose between equals.
LONG = [token for prompt in PROMPTS for token in prompt]
SLOTS = 64
BLOCKS = 512


class TextDrafter:
    """A drafter that knows the texts to come, and is wrong about every third draft."""

    def __init__(self, texts: Mapping[int, Sequence[int]]) -> None:
        self._texts = texts
        self._rng = random.Random(3)

    def draft_rows(self, rows: Sequence[DraftRow], spare: int) -> dict[int, int]:
        found = {}
        for place, sequence, room in rows:
            text, at = self._texts[sequence.id], sequence.length
            drafts = text[at : at + min(2, room)]
            wrong = [token if self._rng.random() < 0.66 else 3 + token % 9 for token in drafts]
            sequence.token_ids[at : at + len(wrong)] = wrong
            if wrong:
                found[place] = len(wrong)
        return found


class Remembered(Golden):
    """transformers, which is asked once for each prompt."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._known: dict[tuple[int, ...], tuple[list[int], torch.Tensor]] = {}

    def greedy(self, prompt: Sequence[int], new: int = NEW) -> tuple[list[int], torch.Tensor]:
        key = (new, *prompt)
        if key not in self._known:
            self._known[key] = super().greedy(prompt, new)
        return self._known[key]


def row(id: int, prompt: Sequence[int], states: StateGrant | None, cached: int = 0) -> PrefillRow:
    width = -(-(len(prompt) + NEW) // BLOCK)
    return PrefillRow(
        sequence=id,
        token_ids=np.array(prompt, np.int32),
        prompt_length=len(prompt),
        cached_length=cached,
        block_ids=list(range(1 + 16 * (id % 20), 1 + 16 * (id % 20) + width)),
        max_new_tokens=NEW,
        states=states,
    )


def serve(runner: Runner, drafter: TextDrafter | None = None) -> Batch:
    return Batch(
        vocab_size=512,
        block_size=BLOCK,
        blocks=BLOCKS,
        eos_ids=(),
        state_slots=SLOTS if runner.info.state_bytes else 0,
        drafter=drafter,
        draft_budget=256,
        clock=lambda: 0,
    )


def run(batch: Batch, runner: Runner, seed: int) -> dict[int, list[int]]:
    """Run to the end in steps of any size, some of them twice; return what each generated."""
    rng = random.Random(seed)
    texts: dict[int, list[int]] = {}
    while (plan := batch.plan(rng.choice([3, 17, 40, 200]))) is not None:
        result = runner.step(plan)
        if rng.random() < 0.3:  # as the worker does with a step that has raised
            middle = len(plan.rows) // 2
            parts = [(0, middle), (middle, len(plan.rows))]
            for first, end in [part for part in parts if part[0] < part[1]]:
                assert not runner.step(slice_plan(plan, first, end)).choices.faults
        moved = batch.settle(plan, result)
        assert not moved.faults
        batch.check()
        for id, found in tokens_of(moved):
            texts.setdefault(id, []).extend(found)
    return texts


# Whose states are also those of others here.
ALIKE = (
    *("lfm2_moe", "qwen3_5_text", "nemotron_h", "mamba", "falcon_h1", "recurrent_gemma"),
    *("bailing_hybrid", "glm5_next"),
)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(each, marks=pytest.mark.thorough if each in ALIKE else ())
        for each in (*FAMILIES, *WRAPPED)
    ],
)
def model(
    checkpoint: Checkpoint,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Runner, GreedyRecorder, Golden]:
    family = request.param
    if family in WRAPPED:
        folder = make_wrapped(tmp_path_factory.mktemp(family), family)
    else:
        folder = checkpoint(family)
    runner, recorder = load(folder, BLOCKS)
    return runner, recorder, Remembered(folder)


def check(golden: Golden, recorder: GreedyRecorder, id: int, prompt: list[int]) -> None:
    found = recorder.by_place[id]
    tokens, logits = golden.greedy(prompt, NEW)
    for ahead, (token, wanted) in enumerate(zip(tokens, logits, strict=True)):
        values = found[len(prompt) + ahead]
        assert int(values.argmax()) == token
        torch.testing.assert_close(
            values.log_softmax(-1), wanted.log_softmax(-1), atol=2e-3, rtol=0
        )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("drafted", [False, True])
def test_a_full_batch_says_what_transformers_says(
    model: tuple[Runner, GreedyRecorder, Golden], drafted: bool
) -> None:
    runner, recorder, golden = model
    assert runner.info.state_bytes
    whole = {id: [*prompt, *golden.greedy(prompt, NEW)[0]] for id, prompt in enumerate(PROMPTS)}
    batch = serve(runner, TextDrafter(whole) if drafted else None)
    for id, prompt in enumerate(PROMPTS):
        batch.add(row(id, prompt, StateGrant((1 + 2 * id, 2 + 2 * id))))
    texts = run(batch, runner, seed=5)
    for id, prompt in enumerate(PROMPTS):
        assert [*prompt, *texts[id]] == whole[id]
        check(golden, recorder, id, prompt)


@pytest.mark.sampled(3)
def test_a_sequence_goes_on_behind_a_snapshot(
    model: tuple[Runner, GreedyRecorder, Golden],
) -> None:
    runner, recorder, golden = model
    prompt = LONG[:90]
    batch = serve(runner)
    batch.add(row(20, prompt, StateGrant((1, 2), saves=((32, 3), (80, 4)))))
    first = run(batch, runner, seed=1)
    # Behind the first, K and V are those of the other sequence, and are not written again.
    batch.add(row(40, prompt, StateGrant((5, 6), source=3, held_length=80), cached=32))
    again = run(batch, runner, seed=2)
    batch.add(row(60, [*prompt[:80], 9, 8, 7], StateGrant((7, 8), source=4), cached=80))
    run(batch, runner, seed=3)
    assert first[20] == again[40]
    check(golden, recorder, 40, prompt)
    check(golden, recorder, 60, [*prompt[:80], 9, 8, 7])


def test_a_sequence_that_comes_back_goes_on_as_before(
    model: tuple[Runner, GreedyRecorder, Golden],
) -> None:
    """Preempted, or behind a shard that died: with what it had said, and slots of others."""
    runner, _, golden = model
    prompt = PROMPTS[-1]
    tokens, _ = golden.greedy(prompt, NEW)
    batch = serve(runner)
    batch.add(row(20, PROMPTS[0], StateGrant((1, 2))))
    run(batch, runner, seed=4)
    known = row(40, [*prompt, *tokens[:5]], StateGrant((2, 1)))
    batch.add(replace(known, prompt_length=len(prompt), max_new_tokens=NEW - 5))
    assert run(batch, runner, seed=6)[40] == tokens[5:]


def test_slots_take_what_the_books_say(checkpoint: Checkpoint) -> None:
    settings = ShardSettings(model_path=checkpoint("lfm2"))
    runner = load_torch_runner(settings, read_config(settings.model_path), sampler=GreedyRecorder())
    found = runner.warm_up(WarmupRequest(64, 256, 64, 1600))
    # Two layers keep two inputs of 64 channels each.
    assert runner.info.state_bytes == 2 * 2 * 64 * 4
    assert found.state_slots == 1 + 2 * 64 + 32
    assert found.state_bytes == found.state_slots * runner.info.state_bytes
    assert runner.info.layers == 1
    # A shard that follows another has what that one found, whatever else would fit.
    again = runner.warm_up(WarmupRequest(64, 256, 64, 0, blocks=50, state_slots=20))
    assert (again.blocks, again.state_slots) == (50, 20)


def test_a_model_with_states_does_not_draft_for_another(checkpoint: Checkpoint) -> None:
    settings = ShardSettings(
        model_path=checkpoint("llama"), draft_model=checkpoint("lfm2"), speculate=2
    )
    with pytest.raises(ConfigurationError, match="layers keep a state per sequence"):
        load_runner(settings)
