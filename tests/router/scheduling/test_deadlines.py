"""The deadlines of sequences: in order, and no more of them than sequences that may still end."""

from __future__ import annotations

import random

import pytest

from tgi_trio.router.scheduling.deadlines import Deadlines


def test_they_are_taken_in_order_and_those_of_ended_sequences_never() -> None:
    rng = random.Random(0)
    for _ in range(50):
        living: dict[int, float] = {}
        deadlines = Deadlines(living.__contains__)
        now, number = 0.0, 0
        for _ in range(400):
            now += rng.random()
            for _ in range(rng.randrange(4)):
                number += 1
                living[number] = now + rng.choice([1.0, 5.0, 1e9]) * rng.random()
                deadlines.add(living[number], number)
            for each in rng.sample(sorted(living), min(len(living), rng.randrange(4))):
                del living[each]
            deadlines.check(set(living))
            assert deadlines.earliest == min(living.values(), default=None)
            taken = []
            while (due := deadlines.take(now)) is not None:
                taken.append((living.pop(due), due))
            assert taken == sorted(taken)
            assert not any(deadline <= now for deadline in living.values())


def test_sequences_that_end_long_before_theirs_leave_nothing() -> None:
    living = {0}
    deadlines = Deadlines(living.__contains__)
    deadlines.add(1.0, 0)  # somebody with an early one is always there
    for number in range(1, 10_000):
        living.add(number)
        deadlines.add(1e9, number)
        living.remove(number)
    assert len(deadlines) <= 64


def test_check_finds_what_is_missing() -> None:
    deadlines = Deadlines(lambda _: True)
    deadlines.add(1.0, 1)
    with pytest.raises(AssertionError, match="missing"):
        deadlines.check({1, 2})
