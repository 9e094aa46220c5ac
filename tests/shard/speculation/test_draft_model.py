"""A smaller model that drafts: it agrees with its like, and changes no token of anybody's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.shard.speculation.eagle_support import eagle
from tests.shard.speculation.heads_support import Watched, answer
from tgi_trio.errors import ConfigurationError
from tgi_trio.ipc.messages import SamplingParameters
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.model.config import read_config
from tgi_trio.model.facts import read_model_facts
from tgi_trio.settings.records import Options
from tgi_trio.settings.resolve import DRAFTED, resolve
from tgi_trio.shard.backend import load_runner
from tgi_trio.shard.runner import Runner
from tgi_trio.shard.speculation.draft_model import CATCH_UP
from tgi_trio.start.checks import check_start
from tgi_trio.testing.checkpoints import make_checkpoint

LONG = [int(i * 7919 % 500) + 3 for i in range(CATCH_UP + 90)]
PROMPTS = [[5, 6, 7, 8, 9], [40, 41, 42]]
GREEDY = SamplingParameters(ignore_eos=True)
SAMPLED = SamplingParameters(sample=True, seed=3, temperature=0.9, top_p=0.95, ignore_eos=True)
ASKED = [
    SAMPLED,
    SamplingParameters(repetition_penalty=1.3, presence_penalty=0.5, ignore_eos=True),
]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("large"), "llama", head_dim=32)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    return make_checkpoint(folder, "llama", head_dim=32, num_hidden_layers=1, seed=5)


def load(model: Path, draft: Path, backend: str) -> Runner:
    return load_runner(
        ShardSettings(model_path=model, draft_model=draft, cpu_backend=backend, cpu_threads=1)
    )


@pytest.mark.parametrize("backend", ["torch", "kernels"])
def test_a_model_drafts_all_that_its_like_says(backend: str, large: Path) -> None:
    runner = load(large, large, backend)
    for asked in (GREEDY, SAMPLED):
        drafter = runner.drafter(3)
        assert drafter is not None
        watched = Watched(drafter)
        found = answer(runner, [PROMPTS[0]], [asked], 24, drafter=watched)
        plain = answer(runner, [PROMPTS[0]], [asked], 24)
        assert found.tokens == plain.tokens and plain.steps == 24
        wrong = [
            (known, own)
            for known, own in watched.drafted
            if own != (PROMPTS[0] + plain.tokens[0])[len(known) : len(known) + len(own)]
        ]
        assert not wrong
        assert found.steps <= 12  # some are plain, to measure what drafting brings


@pytest.mark.parametrize("backend", ["torch", "kernels"])
def test_whatever_it_drafts_the_tokens_are_those_of_plain_decoding(
    backend: str, large: Path, small: Path
) -> None:
    runner = load(large, small, backend)
    for budget in (64, 5):
        plain = answer(runner, PROMPTS, ASKED, 20, budget=budget)
        drafted = answer(runner, PROMPTS, ASKED, 20, budget=budget, drafter=runner.drafter(3))
        assert drafted.tokens == plain.tokens
        assert drafted.drafts > 0


def test_a_long_prompt_is_caught_up_with_before_anything_is_drafted(large: Path) -> None:
    runner = load(large, large, "torch")
    drafter = runner.drafter(3)
    assert drafter is not None
    watched = Watched(drafter)
    found = answer(runner, [LONG], [GREEDY], 16, drafter=watched, longest=512)
    assert found.tokens == answer(runner, [LONG], [GREEDY], 16, longest=512).tokens
    empty = [own for _, own in watched.drafted[:3] if not own]
    assert len(empty) == 2  # steps in which it read the prompt
    assert found.steps < len(LONG) // 64 + 14


def test_its_keys_and_values_are_part_of_what_memory_must_hold(large: Path) -> None:
    runner = load(large, large, "torch")
    alone = load_runner(ShardSettings(model_path=large, cpu_backend="torch", cpu_threads=1))
    from tgi_trio.ipc.startup import WarmupRequest

    request = WarmupRequest(64, 128, 4, 512)
    both, one = runner.warm_up(request), alone.warm_up(request)
    assert both.blocks == one.blocks
    assert both.kv_bytes == 2 * one.kv_bytes and both.weight_bytes == 2 * one.weight_bytes


def test_what_may_draft_nothing_is_not_loaded(large: Path) -> None:
    settings = ShardSettings(
        model_path=large, draft_model=large, speculate=0, cpu_backend="torch", cpu_threads=1
    )
    runner = load_runner(settings)
    assert getattr(runner, "kv_beside", None) == 0  # the model's own runner


def test_models_that_keep_states_are_refused_before_a_shard_is_there(
    large: Path, tmp_path: Path
) -> None:
    hybrid = make_checkpoint(tmp_path / "hybrid", "lfm2")
    settings = resolve(Options(draft_model=hybrid), read_model_facts(large))
    with pytest.raises(ConfigurationError, match="its layers keep a state per sequence"):
        check_start(settings, read_config(settings.model_path))
    drafter = eagle(tmp_path / "eagle", hybrid, 512)
    settings = resolve(Options(draft_model=drafter), read_model_facts(hybrid))
    with pytest.raises(ConfigurationError, match="a lfm2 model computes some again"):
        check_start(settings, read_config(settings.model_path))


@pytest.mark.parametrize("backend", ["torch", "kernels"])
def test_nothing_is_drafted_behind_a_token_that_the_draft_model_has_no_row_for(
    backend: str, large: Path, tmp_path: Path
) -> None:
    """Models of a family are padded to different sizes, and adapters use such rows for marks."""
    narrow = make_checkpoint(
        tmp_path, "llama", head_dim=32, num_hidden_layers=1, seed=5, vocab_size=300
    )
    runner = load(large, narrow, backend)
    drafter = runner.drafter(3)
    assert drafter is not None
    watched, prompts = Watched(drafter), [[5, 400, *range(6, 20)], [40, 41, 42]]
    found = answer(runner, prompts, [GREEDY, GREEDY], 24, drafter=watched)
    assert found.tokens == answer(runner, prompts, [GREEDY, GREEDY], 24).tokens
    drafted = [known for known, own in watched.drafted if own]
    assert drafted and all(max(known) < 300 for known in drafted)


def test_another_tokenizer_is_refused_with_a_token_of_it(
    large: Path, small: Path, tmp_path: Path
) -> None:
    settings = resolve(Options(draft_model=small), read_model_facts(large))
    assert settings.speculate == DRAFTED
    check_start(settings, read_config(settings.model_path))
    other = make_checkpoint(tmp_path, "llama", head_dim=32, num_hidden_layers=1)
    file = other / "tokenizer.json"
    whole = json.loads(file.read_text())
    ids = whole["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    file.write_text(json.dumps(whole))
    settings = resolve(Options(draft_model=other), read_model_facts(large))
    with pytest.raises(ConfigurationError, match=r"another tokenizer than the model: '[ab]' is"):
        check_start(settings, read_config(settings.model_path))
