"""The sampler against a slow oracle, its distributions, and its independence of the batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.shard.sampling_oracle import processed_logprobs
from tgi_trio.ipc.messages import SamplingParameters
from tgi_trio.shard.philox import philox, uniform
from tgi_trio.shard.sampler import Sampler, token_logprobs
from tgi_trio.shard.step import RowResult, Sequence

EOS = 2
CPU = torch.device("cpu")
Logits = NDArray[np.float32]


def sequence(
    tokens: list[int] | None = None, *, prompt: int = 3, minimum: int = 0, **sampling: Any
) -> Sequence:
    tokens = [5, 6, 7, 5, 8] if tokens is None else tokens
    return Sequence(
        id=1,
        token_ids=np.array(tokens, np.int32),
        length=len(tokens),
        prompt_length=prompt,
        computed=len(tokens) - 1,
        block_ids=[1],
        remaining=10,
        min_remaining=minimum,
        sampling=SamplingParameters(**sampling),
    )


def choose(logits: Logits, rows: list[Sequence], **options: Any) -> list[RowResult]:
    """Choose on a copy of `logits` [R, V]."""
    sampler = Sampler(logits.shape[1], [EOS], CPU, **options)
    return sampler.choose(torch.tensor(logits), rows)


def normal(rows: int, size: int, spread: float = 2.0, seed: int = 0) -> Logits:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((rows, size)) * spread).astype(np.float32)


def top(result: RowResult) -> dict[int, float]:
    (tops,) = result.tops
    assert [logprob for _, logprob in tops] == sorted((p for _, p in tops), reverse=True)
    return dict(tops)


# --- against the oracle --------------------------------------------------------------------------


def assert_matches_oracle(logits: Logits, row: Sequence) -> None:
    """The whole processed distribution, read through top_n, equals the oracle's."""
    size = len(logits)
    row = replace(row, sampling=replace(row.sampling, top_n=size))
    (result,) = choose(logits[None], [row])
    wanted = processed_logprobs(logits, row, EOS)
    got = top(result)
    assert got.keys() == wanted.keys()
    assert got == pytest.approx(wanted, abs=2e-5)
    assert result.logprobs[0] == got[result.token_ids[0]]


PROCESSORS: dict[str, dict[str, Any]] = {
    "none": {},
    "temperature": {"temperature": 0.3},
    "hot": {"temperature": 5.0},
    "repetition": {"repetition_penalty": 1.7},
    "repetition below 1": {"repetition_penalty": 0.6},
    "frequency": {"frequency_penalty": 1.5},
    "presence": {"presence_penalty": 1.5},
    "absolute": {
        "frequency_penalty": 0.7,
        "presence_penalty": -0.4,
        "absolute_penalties": True,
    },
    "bias": {"logit_bias": ((5, 3.0), (9, -100.0), (5, 1.0))},
    "watermark": {"watermark": True},
    "top-k": {"top_k": 5},
    "top-k 1": {"top_k": 1},
    "large top-k": {"top_k": 80},
    "top-k of everything": {"top_k": 10**6},
    "top-p": {"top_p": 0.7},
    "tiny top-p": {"top_p": 1e-6},
    "wide top-p": {"top_p": 0.97},
    "typical": {"typical_p": 0.6},
    "wide typical": {"typical_p": 0.97},
    "min-p": {"min_p": 0.2},
    "min-p after top-k": {"min_p": 0.2, "top_k": 30},
    "top-p after a large top-k": {"top_p": 0.5, "top_k": 68},
    "typical after a large top-k": {"typical_p": 0.5, "top_k": 68},
    "typical after top-p": {"typical_p": 0.5, "top_p": 0.9},
    "all": {
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.9,
        "typical_p": 0.8,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "watermark": True,
    },
}


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
    kinds = ({"repetition_penalty": 1.3}, {"frequency_penalty": 1.0, "absolute_penalties": True})
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


def test_token_logprobs_are_the_raw_log_softmax() -> None:
    logits = torch.tensor(normal(5, 30)).to(torch.bfloat16)
    ids = torch.tensor([1, 0, 29, 7, 7])
    wanted = logits.double().log_softmax(-1)[torch.arange(5), ids]
    assert token_logprobs(logits, ids).tolist() == pytest.approx(wanted.tolist(), abs=1e-5)


# --- random numbers ------------------------------------------------------------------------------


def test_philox_gives_the_published_known_answers() -> None:
    counter = [
        [0, 0, 0, 0],
        [0xFFFFFFFF] * 4,
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
    ]
    key = [[0, 0], [0xFFFFFFFF] * 2, [0xA4093822, 0x299F31D0]]
    words = philox(np.array(counter, np.uint64).T, np.array(key, np.uint64).T)
    assert words.T.tolist() == [
        [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ]


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**40)), min_size=1))
def test_a_uniform_depends_on_its_seed_and_position_alone(pairs: list[tuple[int, int]]) -> None:
    seeds, positions = (np.array(column, np.uint64) for column in zip(*pairs, strict=True))
    together = uniform(seeds, positions)
    alone = [uniform(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(len(pairs))]
    assert together.tolist() == alone
    assert (together >= 0).all() and (together < 1).all()
    assert len(set(together.tolist())) == len(set(pairs))


DRAWN: dict[str, tuple[int, float, dict[str, Any]]] = {
    "whole vocabulary": (1000, 1.0, {}),
    "one chunk": (11, 1.0, {}),
    "temperature": (300, 2.0, {"temperature": 0.7}),
    "top-k": (300, 2.0, {"top_k": 20}),
    "top-p": (300, 2.0, {"top_p": 0.8}),
    "typical": (300, 2.0, {"typical_p": 0.8}),
    "min-p": (300, 2.0, {"min_p": 0.1}),
    "flat top-p": (3000, 0.3, {"top_p": 0.8}),
}


@pytest.mark.parametrize("name", DRAWN)
def test_draws_follow_the_processed_distribution(name: str) -> None:
    size, spread, sampling = DRAWN[name]
    logits, draws = normal(1, size, spread)[0], 6000
    tokens = list(range(5))
    rows = [sequence(tokens, sample=True, seed=seed, **sampling) for seed in range(draws)]
    results = choose(np.tile(logits, (draws, 1)), rows)
    wanted = processed_logprobs(logits, rows[0], EOS)
    counts = np.zeros(size)
    np.add.at(counts, [r.token_ids[0] for r in results], 1)
    expected = np.zeros(size)
    expected[list(wanted)] = np.exp(list(wanted.values())) * draws
    assert counts[expected == 0].sum() == 0
    # Pool rare tokens into groups of at least 20 expected draws, then compare as chi-square.
    order = np.argsort(expected)[::-1]
    group = (np.cumsum(expected[order]) // 20).astype(int)
    seen, due = np.bincount(group, counts[order]), np.bincount(group, expected[order])
    seen, due = seen[due > 5], due[due > 5]
    freedom = len(due)
    assert ((seen - due) ** 2 / due).sum() < freedom + 6 * np.sqrt(2 * freedom) + 6


def test_a_seed_and_a_position_give_one_token_and_others_give_others() -> None:
    logits = np.tile(normal(1, 2000, 0.1), (3, 1))

    def drawn(seed: int, length: int) -> int:
        tokens = [1] * length
        return choose(logits[:1], [sequence(tokens, sample=True, seed=seed)])[0].token_ids[0]

    assert len({drawn(7, 9) for _ in range(3)}) == 1
    assert len({drawn(seed, 9) for seed in range(20)}) > 15
    assert len({drawn(7, length) for length in range(1, 21)}) > 15


# --- independence of the batch -------------------------------------------------------------------

MIXED = [
    {"sample": True, "temperature": 0.8},
    {},
    {"sample": True, "top_k": 7, "top_n": 4},
    {"sample": True, "top_p": 0.9, "temperature": 1.3},
    {"sample": True, "top_p": 0.99, "temperature": 4.0, "top_n": 3},
    {"sample": True, "typical_p": 0.7},
    {"sample": True, "min_p": 0.1, "repetition_penalty": 1.4},
    {"frequency_penalty": 0.5, "top_n": 2},
    {"sample": True, "watermark": True, "logit_bias": ((3, 2.0),)},
]


@pytest.mark.parametrize("size", [128, 5003, 33000])
def test_a_row_alone_equals_the_row_in_any_batch_bit_for_bit(size: int) -> None:
    count = 2 * len(MIXED)
    logits = normal(count, size, 3.0)
    rows = [sequence([5, 6, 7, i], seed=i, **MIXED[i % len(MIXED)]) for i in range(count)]
    alone = [choose(logits[i : i + 1], [rows[i]])[0] for i in range(count)]
    rng = np.random.default_rng(1)
    for picked in (np.arange(count), rng.permutation(count), rng.permutation(count)[:5]):
        batch = choose(logits[picked], [rows[i] for i in picked])
        assert batch == [alone[i] for i in picked]


@pytest.mark.parametrize("threads", [1, 2])
def test_the_number_of_threads_changes_nothing(threads: int) -> None:
    logits = normal(4, 40000, 3.0)
    rows = [sequence(seed=i, **MIXED[i]) for i in range(4)]
    before = torch.get_num_threads()
    wanted = choose(logits, rows)
    torch.set_num_threads(threads)
    try:
        assert choose(logits, rows) == wanted
    finally:
        torch.set_num_threads(before)


def test_a_large_batch_is_handled_in_blocks() -> None:
    size = 300_000  # 13 rows to a block
    logits = normal(1, size)
    rows = [sequence(seed=i, sample=True) for i in range(30)]
    batch = choose(np.tile(logits, (30, 1)), rows)
    assert batch == [choose(logits, [row])[0] for row in rows]


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


def test_eos_is_released_while_the_rows_stay_the_same() -> None:
    logits = normal(1, 50)
    logits[0, EOS] = 30.0
    sampler, row = Sampler(50, [EOS], CPU), sequence(minimum=1)
    assert sampler.choose(torch.tensor(logits), [row])[0].token_ids[0] != EOS
    row.min_remaining = 0
    assert sampler.choose(torch.tensor(logits), [row])[0].token_ids[0] == EOS


def test_a_tiny_temperature_is_greedy_not_infinite() -> None:
    logits = normal(1, 50, 100.0)
    (result,) = choose(logits, [sequence(sample=True, temperature=1e-38)])
    assert (result.token_ids[0], result.logprobs[0]) == (int(logits.argmax()), 0.0)


def test_a_bias_for_a_token_that_does_not_exist_faults_its_row_alone() -> None:
    rows = [sequence(logit_bias=((50, 1.0),)), sequence()]
    bad, good = choose(normal(2, 50), rows)
    assert bad.fault == "logit_bias names token 50; the model has 0 to 49"
    assert good.fault is None


class OnlyAfter:
    """Grammars under which token n + 1 follows token n; n is where one begins."""

    def prepare(self, sequence: Sequence) -> bool:
        return sequence.sampling.grammar != "slow"

    def drop(self, sequence: Sequence) -> None:
        self.dropped = sequence

    def allowed(self, sequences: list[Sequence]) -> tuple[NDArray[np.uint8], dict[int, str]]:
        tokens, faults = np.zeros((len(sequences), 50), np.bool_), {}
        for place, one in enumerate(sequences):
            if one.sampling.grammar == "broken":
                faults[place] = "expected a rule at 'broken'"
            else:
                first = int(one.sampling.grammar)
                tokens[place, first + one.length - one.prompt_length] = True
        return np.packbits(tokens, axis=1, bitorder="little"), faults


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
    results = sampler.choose(logits.clone(), [sequence(), sequence(sample=True, top_p=0.5)])
    assert results[0].token_ids == (int(logits[0, :100].argmax()),)
    assert results[1].token_ids[0] < 100


def test_no_rows_give_no_results_and_drop_forgets() -> None:
    sampler, row = Sampler(50, [EOS], CPU), sequence(repetition_penalty=1.2)
    assert sampler.choose(torch.empty(0, 50), []) == []
    sampler.choose(torch.tensor(normal(1, 50)), [row])
    assert row.state
    sampler.drop(row)
    assert not row.state
