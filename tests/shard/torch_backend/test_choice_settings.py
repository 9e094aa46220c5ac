"""What steps ask of the device's sampler, where most of it is that of the step before."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.shard.sampling.sampling_support import sequence
from tgi_trio.shard.contract import ShardSequence
from tgi_trio.shard.sampling.base import MOST_TIES, alternatives
from tgi_trio.shard.sampling.philox import uniform
from tgi_trio.shard.torch_backend.sampling.choice_settings import (
    ChoiceSettings,
    Choosing,
    TopCounts,
    count_up,
    repeat,
)
from tgi_trio.shard.torch_backend.sampling.device_choices import list_best
from tgi_trio.shard.torch_backend.sampling.resident_counts import ADD, ResidentCounts

VOCAB = 50


def choosing_at(rows: list[ShardSequence], positions: list[int]) -> Choosing:
    every, none = count_up(len(rows)), repeat(0, len(rows), np.int64)
    return Choosing(rows, every, none, np.array(positions, np.int64), every)


@given(
    st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 80), st.integers(0, 1)), max_size=8),
)
def test_numbers_drawn_ahead_are_those_of_their_positions(
    seeds: list[int], moves: list[tuple[int, int]]
) -> None:
    """However far rows go between two steps, together or one of them alone."""
    rows = [sequence([1, 2], seed=seed, sample=True) for seed in seeds]
    settings, positions = ChoiceSettings.of(rows, VOCAB), [7 + 3 * i for i in range(len(rows))]
    for far, alone in [(0, 0), (1, 0), *moves, (1, 0)]:
        positions = [place + far + alone * (i == 0) for i, place in enumerate(positions)]
        wanted = uniform(np.array(seeds, np.uint64), np.array(positions, np.uint64))
        assert np.array_equal(settings.draw(choosing_at(rows, positions)), wanted)


@given(st.lists(st.sampled_from(["step", "again", "skip", "drop"]), max_size=12))
def test_rows_that_are_followed_count_what_they_count_one_by_one(events: list[str]) -> None:
    """Steps in turn, repeated, with a token in between that nobody counted, of rows that left."""
    rows = [sequence([3, 4, 5], repetition_penalty=1.1) for _ in range(2)]
    for row in rows:
        row.token_ids = np.resize(row.token_ids, 40)
    one_by_one, followed, length = ResidentCounts(2), ResidentCounts(2), 4
    for event in ["step", *events]:
        length += {"step": 1, "again": 0, "skip": 2, "drop": 1}[event]
        for row in rows:
            row.length = length - 1  # the last token is the device's
        if event == "drop":
            for counts in (one_by_one, followed):
                counts.release(rows[0])
        wanted = [one_by_one.advance(row, length, True, rows) for row in rows]
        slots = followed.follow(rows, np.full(2, length, np.int64))
        nothing_new = all(news.move == ADD and not len(news.ids) for news in wanted)
        assert (slots is not None) == nothing_new
        if slots is None:
            found = [followed.advance(row, length, True, rows) for row in rows]
            assert [news.slot for news in found] == [news.slot for news in wanted]
        else:
            assert slots.tolist() == [news.slot for news in wanted]


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 30), st.integers(1, 99)), max_size=4),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_lists_of_all_choices_are_those_of_each(
    choices: list[tuple[int, int, int]], even: bool, draw: random.Random
) -> None:
    """`choices`: how many tokens are wanted, how many came down, how many values they have.

    `even`: all want as many as the first.
    """
    choices = [(choices[0][0] if even else n, came, kinds) for n, came, kinds in choices]
    rows = [sequence([1], top_n=wanted) for wanted, _, _ in choices]
    listed = np.full((len(rows), 40, 2), -1, np.int32)
    for own, (wanted, count, kinds) in zip(listed, choices, strict=True):
        places = draw.sample(range(40), max(count, wanted))
        own[places, 0] = draw.sample(range(VOCAB), len(places))
        values = [-float(draw.randrange(kinds)) for _ in places]
        own[places, 1] = np.array(values, np.float32).view(np.int32)
    found = list_best(TopCounts.of(np.array([n for n, _, _ in choices], np.int64)), listed)
    assert len(found.each) == len(rows)
    for i, pairs in enumerate(found.each):
        if not choices[i][0]:
            assert not pairs
            continue
        wanted, there = choices[i][0], listed[i][listed[i][:, 0] >= 0]
        values = there[:, 1].copy().view(np.float32).astype(np.float64)
        order = np.lexsort((there[:, 0], -values))[: max(MOST_TIES, wanted)]
        kept = np.ones(len(order), np.bool_)
        assert pairs == alternatives(there[order, 0], values[order], kept, wanted)
