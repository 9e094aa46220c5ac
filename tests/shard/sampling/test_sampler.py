"""The sampler against a slow oracle; its faults, masks and formats."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.shard.sampling.sampling_oracle import assert_logprobs, processed_logprobs
from tests.shard.sampling.sampling_support import (
    CPU,
    EOS,
    MIXED,
    PROCESSORS,
    Logits,
    OnlyAfter,
    choose,
    normal,
    sequence,
    top,
)
from tgi_trio.shard.contract import ShardSequence
from tgi_trio.shard.torch_backend.sampling.torch_sampler import Sampler

# --- against the oracle --------------------------------------------------------------------------


def assert_matches_oracle(logits: Logits, row: ShardSequence) -> None:
    """The whole processed distribution, read through top_n, equals the oracle's."""
    size = len(logits)
    row = replace(row, sampling=replace(row.sampling, top_n=size))
    (result,) = choose(logits[None], [row])
    wanted = processed_logprobs(logits, row, EOS)
    got = top(result)
    assert got.keys() == wanted.keys()
    assert got == pytest.approx(wanted, abs=2e-5)
    assert result.logprobs[0] == got[result.token_ids[0]]


@pytest.mark.parametrize("size", [10, 64, 97, 700, 5003])
@pytest.mark.parametrize("name", PROCESSORS)
def test_a_processor_equals_the_oracle(name: str, size: int) -> None:
    for spread in (0.5, 4.0):
        assert_matches_oracle(normal(1, size, spread)[0], sequence(**PROCESSORS[name]))


@given(
    seed=st.integers(0, 10**6),
    size=st.integers(12, 900),
    spread=st.floats(0.2, 8.0),
    tokens=st.lists(st.integers(0, 11), min_size=3, max_size=20),
    sampling=st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.floats(0.2, 3.0),
            "top_k": st.integers(1, 1000),
            "top_p": st.floats(0.01, 0.99),
            "typical_p": st.floats(0.01, 0.99),
            "min_p": st.floats(0.001, 0.9),
            "repetition_penalty": st.floats(0.5, 2.0),
            "frequency_penalty": st.floats(-2.0, 2.0),
            "presence_penalty": st.floats(-2.0, 2.0),
            "absolute_penalties": st.booleans(),
            "watermark": st.booleans(),
            "ignore_eos": st.booleans(),
            "logit_bias": st.just(((3, 2.5), (4, -1.5))),
        },
    ),
    minimum=st.integers(0, 1),
)
def test_any_combination_equals_the_oracle(
    seed: int,
    size: int,
    spread: float,
    tokens: list[int],
    sampling: dict[str, Any],
    minimum: int,
) -> None:
    logits = normal(1, size, spread, seed)[0]
    assert_matches_oracle(logits, sequence(tokens, minimum=minimum, **sampling))


def test_penalties_follow_a_growing_sequence_and_a_replay_alike() -> None:
    kinds: tuple[dict[str, Any], ...] = (
        {"repetition_penalty": 1.3},
        {"frequency_penalty": 1.0, "absolute_penalties": True},
    )
    for kind in kinds:
        grown = sequence([5, 6, 7], **kind)
        for token in (9, 9, 5, 11):
            logits = normal(1, 50, seed=token)
            (old,) = choose(logits, [grown])
            (fresh,) = choose(logits, [sequence(grown.token_ids.tolist(), **kind)])
            assert old == fresh
            grown.token_ids = np.append(grown.token_ids, np.int32(token))
            grown.length += 1


def test_tgi_frequency_penalty_is_relative_and_openai_s_is_absolute() -> None:
    logits = np.zeros((1, 20), np.float32)
    tokens = [5, 5, 6, 5, 5, 8, 8, 9]  # 3 of prompt
    relative = sequence(tokens, frequency_penalty=1.0, top_n=20)
    absolute = sequence(tokens, frequency_penalty=1.0, top_n=20, absolute_penalties=True)
    raw, sized = top(choose(logits, [absolute])[0]), top(choose(logits, [relative])[0])
    assert raw[0] - raw[5] == pytest.approx(2.0, abs=1e-6)  # twice, generated ones only
    assert raw[0] - raw[6] == pytest.approx(0.0, abs=1e-6)
    assert sized[0] - sized[5] == pytest.approx(4 / 8, abs=1e-6)


# --- greedy, logprobs, alternatives --------------------------------------------------------------


def test_greedy_is_the_argmax_with_the_raw_log_softmax() -> None:
    for size in (7, 64, 1000, 5003):
        logits = normal(40, size)
        results = choose(logits, [sequence() for _ in logits])
        assert [r.token_ids[0] for r in results] == logits.argmax(axis=1).tolist()
        raw = torch.tensor(logits, dtype=torch.float64).log_softmax(-1).max(-1).values
        assert [r.logprobs[0] for r in results] == pytest.approx(raw.tolist(), abs=1e-6)
        assert all(r.tops == ([],) for r in results)


@pytest.mark.parametrize("kind", [{}, {"sample": True, "temperature": 0.8}, {"typical_p": 0.9}])
def test_a_large_vocabulary_costs_no_precision(kind: dict[str, Any]) -> None:
    """Numbers summed one after the other in float32 would be off by 4e-5."""
    logits = normal(4, 150_000, 4.0)
    rows = [sequence(seed=i, **kind) for i in range(len(logits))]
    for result, scores, row in zip(choose(logits, rows), logits, rows, strict=True):
        assert_logprobs(result, scores, row, EOS)


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    logits = np.zeros((1, 300), np.float32)
    logits[0, [17, 80, 299]] = 4.0
    assert choose(logits, [sequence()])[0].token_ids == (17,)
    assert choose(logits, [sequence(top_k=2)])[0].token_ids == (17,)


def test_a_single_survivor_has_logprob_0() -> None:
    (result,) = choose(normal(1, 50), [sequence(sample=True, top_k=1)])
    assert result.logprobs == (0.0,)


@pytest.mark.parametrize(
    ("count", "ids"),
    [(0, []), (2, [0, 3]), (3, [0, 3, 1, 4]), (4, [0, 3, 1, 4]), (5, [0, 3, 1, 4, 2])],
)
@pytest.mark.parametrize("cut", [{}, {"top_p": 0.999999}, {"typical_p": 0.999999}])
def test_alternatives_include_ties_with_the_last(
    count: int, ids: list[int], cut: dict[str, Any]
) -> None:
    logits = np.array([[-1, -3, -4, -2, -3]], np.float32)
    (result,) = choose(logits, [sequence(top_n=count, **cut)])
    assert [token for token, _ in result.tops[0]] == ids


def test_alternatives_are_only_what_was_kept() -> None:
    (result,) = choose(normal(1, 500), [sequence(top_n=10, top_k=3)])
    assert len(result.tops[0]) == 3
    assert sum(np.exp(p) for _, p in result.tops[0]) == pytest.approx(1.0)


def test_ties_at_the_edge_of_top_k_are_kept_however_many() -> None:
    logits = np.full((1, 900), -5.0, np.float32)
    logits[0, 100:800] = 1.0
    (result,) = choose(logits, [sequence(top_k=3, top_n=900)])
    assert sorted(top(result)) == list(range(100, 800))


# --- faults, masks, formats ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "word"), [(np.nan, "NaN"), (np.inf, "infinity"), (-np.inf, "forbid all")]
)
def test_a_broken_row_faults_alone(value: float, word: str) -> None:
    logits = normal(4, 100)
    rows = [sequence(seed=i, **kind) for i, kind in enumerate(MIXED[:4])]
    wanted = choose(logits, rows)
    for broken in range(4):
        spoilt = logits.copy()
        spoilt[broken, slice(None) if value == -np.inf else 50] = value
        results = choose(spoilt, rows)
        assert word in (results[broken].fault or "")
        assert not results[broken].token_ids
        assert [r for i, r in enumerate(results) if i != broken] == [
            r for i, r in enumerate(wanted) if i != broken
        ]


def test_masked_logits_of_the_model_are_never_chosen() -> None:
    logits = np.full((4, 90), -np.inf, np.float32)
    logits[:, [4, 60]] = [1.0, 2.0]
    kinds: list[dict[str, Any]] = [
        {},
        {"sample": True},
        {"sample": True, "top_k": 5},
        {"sample": True, "typical_p": 0.9},
    ]
    for result in choose(logits, [sequence(top_n=5, **kind) for kind in kinds]):
        assert set(top(result)) <= {4, 60}
        assert result.token_ids[0] in (4, 60)


def test_eos_is_held_back_until_min_new_tokens() -> None:
    logits = normal(1, 50)
    logits[0, EOS] = 30.0
    assert choose(logits, [sequence(minimum=1)])[0].token_ids[0] != EOS
    assert choose(logits, [sequence(minimum=0)])[0].token_ids[0] == EOS
    assert choose(logits, [sequence(minimum=1, ignore_eos=True)])[0].token_ids[0] == EOS


def test_a_row_s_own_ends_are_held_back_as_well_and_no_other_s() -> None:
    logits = normal(2, 50)
    logits[:, 9] = 30.0
    held, free = choose(logits, [sequence(minimum=1, ends=(9, 70)), sequence(minimum=1)])
    assert held.token_ids[0] != 9 == free.token_ids[0]
    assert choose(logits, [sequence(ends=(9,))])[0].token_ids[0] == 9


def test_eos_is_released_while_the_rows_stay_the_same() -> None:
    logits = normal(1, 50)
    logits[0, EOS] = 30.0
    sampler, row = Sampler(50, [EOS], CPU), sequence(minimum=1)
    assert sampler.choose(torch.tensor(logits), [row]).token_ids[0] != EOS
    row.min_remaining = 0
    assert sampler.choose(torch.tensor(logits), [row]).token_ids[0] == EOS


def test_a_tiny_temperature_is_greedy_not_infinite() -> None:
    logits = normal(1, 50, 100.0)
    (result,) = choose(logits, [sequence(sample=True, temperature=1e-38)])
    assert (result.token_ids[0], result.logprobs[0]) == (int(logits.argmax()), 0.0)


def test_a_bias_for_a_token_that_does_not_exist_faults_its_row_alone() -> None:
    rows = [sequence(logit_bias=((50, 1.0),)), sequence()]
    bad, good = choose(normal(2, 50), rows)
    assert bad.fault == "logit_bias names token 50; the model has 0 to 49"
    assert good.fault is None


def test_a_grammar_masks_its_own_row() -> None:
    rows = [
        sequence([5, 6, 7, 20, 21], grammar="20"),
        sequence(),
        sequence(grammar="broken"),
        sequence(grammar="20", sample=True, temperature=3.0),
    ]
    logits = normal(4, 50)
    forced, free, broken, sampled = choose(logits, rows, grammars=OnlyAfter())
    assert (forced.token_ids, forced.logprobs) == ((22,), (0.0,))
    assert free.token_ids == (int(logits[1].argmax()),)
    assert broken.fault == "grammar: expected a rule at 'broken'"
    assert sampled.token_ids == (22,)
    assert "without a tokenizer" in (choose(logits[:1], rows[:1])[0].fault or "")


def test_only_sequences_with_a_grammar_may_have_to_wait() -> None:
    sampler = Sampler(50, [EOS], CPU, grammars=OnlyAfter())
    assert sampler.prepare(sequence())
    assert sampler.prepare(sequence(grammar="20"))
    assert not sampler.prepare(sequence(grammar="slow"))


def test_logits_may_be_wider_than_the_vocabulary_and_of_any_float_type() -> None:
    logits = torch.tensor(normal(2, 130)).to(torch.bfloat16)
    logits[:, 100:] = 50.0
    sampler = Sampler(100, [EOS], CPU)
    results = sampler.choose(logits.clone(), [sequence(), sequence(sample=True, top_p=0.5)]).rows
    assert results[0].token_ids == (int(logits[0, :100].argmax()),)
    assert results[1].token_ids[0] < 100


def test_no_rows_give_no_results_and_drop_forgets() -> None:
    sampler, row = Sampler(50, [EOS], CPU), sequence(repetition_penalty=1.2)
    assert len(sampler.choose(torch.empty(0, 50), []).counts) == 0
    sampler.choose(torch.tensor(normal(1, 50)), [row])
    assert row.state
    sampler.drop(row)
    assert not row.state
