"""Greedy output of the five main families equals transformers, however it is computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.shard.torch_backend.golden import Golden, assert_greedy, check_prompt_logprobs
from tests.shard.torch_backend.models_support import (
    NEW_TOKENS,
    advance,
    drafting_plan,
    generated,
    load,
    plan,
    prompts,
    run,
    sequence,
    sequences,
    tables,
)
from tgi_trio.shard.contract import ShardSequence

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "deepseek_v3", "gpt_oss")
PROMPTS = prompts(10)
pytestmark = pytest.mark.usefixtures("one_thread")

Checkpoint = Callable[..., Path]


class Model:
    """A runner, its sampler, transformers' model, and what that generates alone."""

    def __init__(self, folder: Path) -> None:
        self.runner, self.recorder = load(folder)
        self.golden = Golden(folder)
        # Three by decoding step by step; the rest from one forward over what we generated, where
        # every row's best must be the token that follows. That is the same, and far quicker.
        self.expected = {i: self.golden.greedy(PROMPTS[i]) for i in (0, 5, 6)}
        rows = _rows()
        run(self.runner, rows)
        self.recorder.by_place.clear()
        for row in rows:
            if row.id not in self.expected:
                logits = self.golden.logits(PROMPTS[row.id], generated(row))
                self.expected[row.id] = logits.argmax(-1).tolist(), logits

    def check(self, rows: list[ShardSequence]) -> None:
        for row in rows:
            tokens, logits = self.expected[row.id]
            assert generated(row) == tokens
            ours = self.recorder.logits(row.id)
            torch.testing.assert_close(ours, logits, atol=1e-4, rtol=0.0)
            self.recorder.drop(row)


# Whose attention is also that of others here; what each computes besides, test_models_families.py.
ALIKE = ("mistral", "qwen2")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(each, marks=pytest.mark.thorough if each in ALIKE else ()) for each in FAMILIES
    ],
)
def model(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> Model:
    return Model(checkpoint(request.param))


def _rows(shuffle: int | None = None) -> list[ShardSequence]:
    return sequences(PROMPTS, shuffle)


def test_the_output_wanders(model: Model) -> None:
    """The other tests would pass for a model that says one token for ever."""
    assert all(len(set(tokens)) > 5 for tokens, _ in model.expected.values())
    assert len({tuple(tokens) for tokens, _ in model.expected.values()}) == len(PROMPTS)


def test_alone(model: Model) -> None:
    for row in _rows()[:7:2]:
        run(model.runner, [row])
        model.check([row])


def test_in_a_batch(model: Model) -> None:
    rows = _rows()
    run(model.runner, rows)
    model.check(rows)


def test_chunked_prefills_among_decodes(model: Model) -> None:
    rows = _rows()
    run(model.runner, rows, chunk=9, joins=1)
    model.check(rows)


def test_shuffled_block_tables(model: Model) -> None:
    rows = _rows(shuffle=1)
    run(model.runner, rows, chunk=20, joins=3, seed=1)
    model.check(rows)


def test_replay_of_prompt_and_emitted_tokens(model: Model) -> None:
    """A sequence that is put into a fresh cache with what it had said goes on as before."""
    prompt, (tokens, _) = PROMPTS[6], model.expected[6]
    row = sequence(6, prompt + tokens[:15], range(1, 9), new=NEW_TOKENS - 15)
    row.prompt_length = len(prompt)
    run(model.runner, [row])
    assert generated(row) == tokens
    model.recorder.by_place.clear()


def test_shared_prefix_blocks(model: Model) -> None:
    """A row may start behind blocks that another row has filled."""
    first = sequence(0, PROMPTS[5], range(1, 7))
    run(model.runner, [first])
    second = sequence(5, PROMPTS[5], [1, 2, 20, 21, 22, 23])
    second.computed = 32
    model.recorder.by_place.clear()
    run(model.runner, [second])
    model.check([second])


def test_preempted_and_resumed(model: Model) -> None:
    """Rows lose their blocks to others on the way and are computed again in different ones."""
    rows = _rows()
    counts = [row.length for row in rows]
    for _ in range(NEW_TOKENS // 2):
        advance(model.runner, rows, counts)
        counts = [1] * len(rows)
    for row in rows:
        model.runner.drop(row)
    blocks = tables(PROMPTS, shuffle=9)
    resumed = []
    for row in rows:
        known = row.token_ids[: row.length].tolist()
        again = sequence(row.id, known, blocks[row.id], new=row.remaining)
        again.prompt_length = row.prompt_length
        resumed.append(again)
    run(model.runner, resumed, chunk=25, joins=3)
    for row in resumed:
        assert generated(row) == model.expected[row.id][0]
    model.recorder.by_place.clear()


@pytest.mark.parametrize("wrong", [None, 0, 2])
def test_drafts_right_and_wrong(model: Model, wrong: int | None) -> None:
    """Drafts of up to 4 tokens, the `wrong`-th not right, are as decoding one by one."""
    rows = _rows(shuffle=4)
    advance(model.runner, rows, [row.length for row in rows])
    steps = 1
    while running := [row for row in rows if row.remaining]:
        drafts = []
        for row in running:
            said = NEW_TOKENS - row.remaining
            ids = model.expected[row.id][0][said : said + min(4, row.remaining - 1)]
            if wrong is not None and wrong < len(ids):
                ids = [*ids[:wrong], ids[wrong] ^ 1, *ids[wrong + 1 :]]
            drafts.append(ids)
        result = model.runner.step(drafting_plan(running, drafts))
        for row, got in zip(running, result.rows, strict=True):
            for token in got.token_ids:
                row.token_ids[row.length] = token
                row.length += 1
                row.remaining -= 1
            row.computed = row.length - 1
        steps += 1
    assert steps == {None: 1 + 8, 0: NEW_TOKENS, 2: 1 + 13}[wrong]
    model.check(rows)


def test_a_step_may_be_repeated(model: Model) -> None:
    """The worker repeats a step for part of its rows when one of them fails."""
    rows = _rows()
    counts = [row.length for row in rows]
    once = model.runner.step(plan(rows, counts))
    again = model.runner.step(plan(rows[3:7], counts[3:7]))
    assert [r.token_ids for r in once.rows[3:7]] == [r.token_ids for r in again.rows]
    assert all(row.computed == 0 for row in rows)
    model.recorder.by_place.clear()


@pytest.mark.parametrize("chunk", [1000, 5])
def test_prompt_logprobs(model: Model, chunk: int) -> None:
    check_prompt_logprobs(model.runner, model.golden, PROMPTS[5:7], chunk)
    model.recorder.by_place.clear()


def test_bfloat16_stays_near(checkpoint: Checkpoint) -> None:
    """Rounding may change tokens, but not the picture: scores correlate with float32's."""
    some = prompts(16)
    for family in FAMILIES:
        folder = checkpoint(family)
        runner, recorder = load(folder, dtype="bfloat16")
        assert runner.info.dtype == "bfloat16"
        rows = sequences(some)
        run(runner, rows, chunk=16, joins=4)
        golden = Golden(folder)
        for row in rows[::5]:
            expected = golden.logits(some[row.id], generated(row))
            ours = recorder.logits(row.id)
            pairs = torch.stack((ours.flatten(), expected.flatten()))
            assert torch.corrcoef(pairs)[0, 1] > 0.99


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_beyond_a_sliding_window(checkpoint: Checkpoint, family: str) -> None:
    window = {"sliding_window": 24}
    if family != "mistral":
        window |= {"use_sliding_window": True, "max_window_layers": 1}
    folder = checkpoint(family, **window)
    runner, recorder = load(folder)
    golden = Golden(folder)
    rows = _rows(shuffle=5)
    run(runner, rows, chunk=30, joins=4)
    for row in rows[::3]:
        assert_greedy(golden, recorder, row)
    unbounded, _ = load(checkpoint(family))
    longest = max(_rows(), key=lambda row: row.length)
    run(unbounded, [longest])
    assert generated(rows[longest.id]) != generated(longest)
