"""The kernels' sampler gives what torch's gives: the same tokens, log-probabilities and faults."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.shard.sampling.sampling_oracle import assert_logprobs, processed_logprobs
from tests.shard.sampling.sampling_support import (
    EOS,
    MIXED,
    PROCESSORS,
    Logits,
    OnlyAfter,
    normal,
    sequence,
    top,
)
from tgi_trio.model.config import ModelConfig
from tgi_trio.shard.contract import RowResult, ShardSequence
from tgi_trio.shard.cpu_backend.arena import address
from tgi_trio.shard.cpu_backend.cpu_sampler import CpuSampler, permutation
from tgi_trio.shard.cpu_backend.machine_code.entry import DRAW_UNIFORMS
from tgi_trio.shard.cpu_backend.self_tests import sampler as sampler_self_test
from tgi_trio.shard.cpu_backend.verified import choose_sampler
from tgi_trio.shard.sampling.philox import uniform
from tgi_trio.shard.torch_backend.sampling.torch_sampler import Sampler
from tgi_trio.shard.torch_backend.sampling.torch_sampler import permutation as torch_permutation


def choose(logits: Logits, rows: list[ShardSequence], **options: Any) -> list[RowResult]:
    """Choose on a copy of `logits` [R, V]."""
    return CpuSampler(logits.shape[1], [EOS], **options).choose(logits.copy(), rows).rows


def by_torch(logits: Logits, rows: list[ShardSequence], **options: Any) -> list[RowResult]:
    sampler = Sampler(logits.shape[1], [EOS], torch.device("cpu"), **options)
    return sampler.choose(torch.tensor(logits), rows).rows


def assert_same(found: list[RowResult], wanted: list[RowResult]) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.fault == theirs.fault
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
        for mine, other in zip(ours.tops, theirs.tops, strict=True):
            assert [token for token, _ in mine] == [token for token, _ in other]
            assert [p for _, p in mine] == pytest.approx([p for _, p in other], abs=1e-5)


@pytest.fixture
def cores() -> Iterator[list[int]]:
    """Two cores; the helpers' affinity is theirs, so nothing is left behind."""
    allowed = sorted(os.sched_getaffinity(0))
    yield [allowed[0], allowed[-1]]


@pytest.mark.parametrize("size", [10, 64, 97, 700, 5003])
@pytest.mark.parametrize("name", PROCESSORS)
def test_a_processor_equals_the_oracle(name: str, size: int) -> None:
    """The whole distribution, read through the alternatives."""
    for spread in (0.5, 4.0):
        logits = normal(1, size, spread)
        row = sequence(**PROCESSORS[name], top_n=size)
        (result,) = choose(logits, [row])
        wanted = processed_logprobs(logits[0], row, EOS)
        got = top(result)
        assert got == pytest.approx(wanted, abs=2e-5)
        assert result.logprobs[0] == got[result.token_ids[0]]


SETTINGS = st.fixed_dictionaries(
    {"sample": st.booleans(), "seed": st.integers(0, 2**64 - 1)},
    optional={
        "temperature": st.floats(0.2, 3.0),
        "top_k": st.integers(1, 4000),
        "top_p": st.floats(0.01, 0.99),
        "typical_p": st.floats(0.01, 0.99),
        "min_p": st.floats(0.001, 0.9),
        "top_n": st.integers(0, 8),
        "repetition_penalty": st.floats(0.5, 2.0),
        "frequency_penalty": st.floats(-2.0, 2.0),
        "watermark": st.booleans(),
        "logit_bias": st.just(((3, 2.5), (4, -1.5))),
    },
)


@given(
    seed=st.integers(0, 10**6),
    size=st.integers(12, 6000),
    spread=st.sampled_from([0.0, 0.1, 0.7, 2.0, 8.0]),
    settings=st.lists(SETTINGS, min_size=1, max_size=5),
    minimum=st.integers(0, 1),
)
def test_any_batch_equals_torch(
    seed: int, size: int, spread: float, settings: list[dict[str, Any]], minimum: int
) -> None:
    logits = np.round(normal(len(settings), size, spread, seed), 3)  # so that there are ties
    rows = [sequence(minimum=minimum, **one) for one in settings]
    for ours, theirs, row, scores in zip(
        choose(logits, rows), by_torch(logits, rows), rows, logits, strict=True
    ):
        if ours.token_ids == theirs.token_ids:
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        else:  # a sum in another order decides: the tokens must be neighbours at the edge
            assert near_an_edge(scores, row, ours.token_ids[0], theirs.token_ids[0])


def near_an_edge(scores: Logits, row: ShardSequence, ours: int, theirs: int) -> bool:
    """Whether a change of a millionth of the mass makes one choice into the other.

    Then either both are next to each other in the order of drawing, with nothing to choose from
    between them, or one is the last that a truncation keeps.
    """
    tighter, looser = (
        processed_logprobs(scores, replace(row, sampling=replaced(row, by)), EOS)
        for by in (-1e-6, 1e-6)
    )
    edge = tighter.keys() ^ looser.keys()
    if edge:
        return True
    order = sorted(looser) if len(looser) > 64 else sorted(looser, key=lambda t: -looser[t])
    return abs(order.index(ours) - order.index(theirs)) == 1


def replaced(row: ShardSequence, by: float) -> Any:
    sampling = row.sampling
    return replace(
        sampling,
        top_p=min(sampling.top_p + by, 1.0) if sampling.top_p < 1 else 1.0,
        typical_p=min(sampling.typical_p + by, 1.0) if sampling.typical_p < 1 else 1.0,
    )


@pytest.mark.parametrize(
    ("size", "spread"),
    [*((size, spread) for size in (128, 5003) for spread in (0.3, 1.0, 4.0)), (33000, 0.3)],
)
def test_a_mixed_batch_equals_torch_and_float64_with_any_number_of_threads(
    size: int, spread: float, cores: list[int]
) -> None:
    count = 2 * len(MIXED)  # so many of the largest size are shared among threads
    logits = normal(count, size, spread)
    rows = [sequence([5, 6, 7, i], seed=i, **MIXED[i % len(MIXED)]) for i in range(count)]
    alone, torchs = choose(logits, rows), by_torch(logits, rows)
    assert [one.token_ids for one in alone] == [one.token_ids for one in torchs]
    for ours, theirs, scores, row in zip(alone, torchs, logits, rows, strict=True):
        assert_logprobs(ours, scores, row, EOS)
        assert_logprobs(theirs, scores, row, EOS)
    assert choose(logits, rows, cores=cores) == alone


def test_a_row_alone_equals_the_row_in_any_batch_bit_for_bit() -> None:
    count = 2 * len(MIXED)
    logits = normal(count, 5003, 1.0)
    rows = [sequence([5, 6, 7, i], seed=i, **MIXED[i % len(MIXED)]) for i in range(count)]
    alone = [choose(logits[i : i + 1], [rows[i]])[0] for i in range(count)]
    picked = np.random.default_rng(1).permutation(count)
    assert choose(logits[picked], [rows[i] for i in picked]) == [alone[i] for i in picked]


def test_ties_at_the_edge_of_top_k_are_kept_and_of_top_p_are_not() -> None:
    logits = np.full((2, 900), -5.0, np.float32)
    logits[:, 100:800] = 1.0
    rows = [sequence(top_k=3, top_n=900), sequence(top_p=0.5, top_n=900)]
    every, half = choose(logits, rows)
    assert sorted(top(every)) == list(range(100, 800))
    assert sorted(top(half)) == list(range(100, 100 + len(top(half))))
    assert len(top(half)) == len(top(by_torch(logits, rows)[1]))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_broken_row_faults_alone(value: float) -> None:
    logits = normal(4, 100)
    logits[1, 7] = -np.inf  # harmless
    rows = [sequence(seed=i, **kind) for i, kind in enumerate(MIXED[:4])]
    for broken in range(4):
        spoilt = logits.copy()
        spoilt[broken, slice(None) if value == -np.inf else 50] = value
        found = choose(spoilt, rows)
        assert found[broken].fault
        assert_same(found, by_torch(spoilt, rows))


def test_infinities_of_both_signs_are_named_as_torch_names_them() -> None:
    logits = normal(1, 100)
    logits[0, :2] = [np.inf, -np.inf]
    assert_same(choose(logits, [sequence()]), by_torch(logits, [sequence()]))


def test_masked_tokens_grammars_and_wider_logits() -> None:
    logits = np.full((4, 90), -np.inf, np.float32)
    logits[:, [4, 60]] = [1.0, 2.0]
    kinds: list[dict[str, Any]] = [{}, {"sample": True}, {"top_k": 5}, {"typical_p": 0.9}]
    rows = [sequence(top_n=5, **kind) for kind in kinds]
    assert_same(choose(logits, rows), by_torch(logits, rows))
    guided = [sequence(grammar="20"), sequence(grammar="broken"), sequence(sample=True)]
    small = normal(3, 50)
    found = choose(small, guided, grammars=OnlyAfter())
    assert_same(found, by_torch(small, guided, grammars=OnlyAfter()))
    wide = normal(2, 130)
    wide[:, 100:] = 50.0
    results = (
        CpuSampler(100, [EOS]).choose(wide, [sequence(), sequence(sample=True, top_p=0.5)]).rows
    )
    assert all(result.token_ids[0] < 100 for result in results)


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)), max_size=5))
def test_random_numbers_are_those_of_philox_to_the_bit(pairs: list[tuple[int, int]]) -> None:
    seeds, positions = np.array(pairs, np.uint64).reshape(-1, 2).T.copy()
    numbers = np.empty(len(seeds))
    DRAW_UNIFORMS.open()(*map(address, (seeds, positions, numbers)), len(numbers))
    assert numbers.tolist() == uniform(seeds, positions).tolist()


def test_a_tiny_temperature_is_greedy_not_infinite() -> None:
    logits = normal(1, 50, 100.0)
    (result,) = choose(logits, [sequence(sample=True, temperature=1e-38)])
    assert (result.token_ids[0], result.logprobs[0]) == (int(logits.argmax()), 0.0)


def test_kernels_that_fail_their_self_test_leave_the_choice_to_torch(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert sampler_self_test.find_fault() is None
    config = object.__new__(ModelConfig)
    object.__setattr__(config, "vocab_size", 50)
    object.__setattr__(config, "eos_ids", (EOS,))
    assert isinstance(choose_sampler(config, [0], None), CpuSampler)
    monkeypatch.setattr(sampler_self_test, "find_fault", lambda: "row 0 is wrong")
    assert isinstance(choose_sampler(config, [0], None), Sampler)
    assert "with torch, not with the CPU kernels: row 0 is wrong" in capfd.readouterr().err


@given(st.integers(0, 2**40), st.integers(1, 5000), st.floats(0, 1))
def test_permutations_are_those_of_torch(seed: int, size: int, share: float) -> None:
    count = int(share * size)
    found, wanted = permutation(seed, size, count), torch_permutation(seed, size, count)
    assert found.tolist() == wanted.tolist()
