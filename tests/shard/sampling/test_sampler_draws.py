"""The sampler's random numbers, and its independence of the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.shard.sampling.sampling_oracle import processed_logprobs
from tests.shard.sampling.sampling_support import EOS, MIXED, choose, normal, sequence
from tgi_trio.shard.sampling.philox import philox, uniform


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
