"""Drafting rests where it costs more than it brings, and comes back where it pays."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tgi_trio.shard.speculation.payoff import (
    BELIEVED,
    EVERY,
    FIRST_REST,
    LONGEST_REST,
    PLAIN,
    PROBES,
    TRIAL,
    Payoff,
)

STEP = 1_000_000  # nanoseconds of a plain step


def serve(
    payoff: Payoff, steps: int, *, cost: Callable[[int], float], tokens: float, rows: int = 1
) -> tuple[float, int]:
    """Run steps of `rows`; return tokens a second in those of plain decoding, and drafting steps.

    A step with drafts takes `cost(step)` plain ones and brings `tokens` a row on average.
    """
    elapsed, brought, tried, owed = 0.0, 0, 0, 0.0
    for i in range(steps):
        if payoff.allows(rows):
            owed += tokens * rows
            got = int(owed)
            owed -= got
            took = cost(i)
            payoff.note(rows, drafted=True, tokens=got, took_ns=int(took * STEP))
            tried += 1
        else:
            got, took = rows, 1.0
            payoff.note(rows, drafted=False, tokens=rows, took_ns=STEP)
        elapsed += took
        brought += got
    return brought / rows / elapsed, tried


@pytest.mark.parametrize("cost", [0.9, 1.1, 1.6, 3.0])  # 0.9: a clock that is out
@pytest.mark.parametrize("steps", [200, 2000])
def test_drafts_that_are_always_wrong_cost_less_than_three_hundredths(
    cost: float, steps: int
) -> None:
    rate, tried = serve(Payoff(), steps, cost=lambda _: cost, tokens=1.0)
    assert rate >= 0.97
    trials = (steps // FIRST_REST).bit_length()  # at most: rests are twice as long each time
    assert 0 < tried <= PROBES * trials


@pytest.mark.parametrize("cost", [1.3, 2.0])
def test_what_is_right_too_seldom_rests_after_few_steps(cost: float) -> None:
    rate, tried = serve(Payoff(), 4000, cost=lambda _: cost, tokens=1.2)
    assert rate >= 0.97 and tried > 0


def test_luck_excuses_few_steps_and_not_many() -> None:
    payoff, rates = Payoff(), iter([4, 1, 1, 1] * 100)  # 1.75 tokens for the time of 2: uneven
    rests: list[int] = []
    for step in range(300):
        if payoff.allows(1):
            payoff.note(1, drafted=True, tokens=next(rates), took_ns=2 * STEP)
        else:
            payoff.note(1, drafted=False, tokens=1, took_ns=STEP)
        if payoff.is_resting(1):
            rests.append(step)
    assert rests and rests[0] > TRIAL + PLAIN, "the first few were not given the benefit of doubt"
    assert rests[0] <= BELIEVED + TRIAL + PLAIN + EVERY


def test_a_trial_rests_as_long_as_it_was_dear() -> None:
    cheap, dear = Payoff(), Payoff()
    _, often = serve(cheap, 400, cost=lambda _: 1.1, tokens=1.0)
    _, seldom = serve(dear, 400, cost=lambda _: 4.0, tokens=1.0)
    assert often > seldom == PROBES


def test_a_gain_is_kept_up_to_what_it_takes_to_go_on_measuring() -> None:
    rate, tried = serve(Payoff(), 2000, cost=lambda _: 1.2, tokens=2.0)
    assert rate > 0.97 * 2.0 / 1.2
    assert tried > 1900


def test_what_does_not_pay_for_many_rows_goes_on_for_few() -> None:
    payoff = Payoff()
    many, _ = serve(payoff, 1000, cost=lambda _: 1.8, tokens=1.4, rows=8)
    few, _ = serve(payoff, 1000, cost=lambda _: 1.1, tokens=1.4, rows=1)
    assert many >= 0.97 and few > 1.2
    assert (payoff.gain(1) or 0) > 1.2


def test_drafting_comes_back_when_it_begins_to_pay() -> None:
    payoff = Payoff()
    serve(payoff, 300, cost=lambda _: 1.5, tokens=1.0)
    rate, tried = serve(payoff, 2 * LONGEST_REST, cost=lambda _: 1.2, tokens=2.4)
    assert tried > LONGEST_REST / 2 and rate > 1.3


def test_a_lone_slow_step_decides_nothing() -> None:
    _, tried = serve(Payoff(), 2000, cost=lambda i: 40.0 if i % 200 == 7 else 1.2, tokens=2.0)
    assert tried > 1900


@pytest.mark.parametrize("seed", range(8))
def test_a_busy_machine_does_not_end_drafts_that_pay(seed: int) -> None:
    """Every third step or so is slowed down, whether it drafts or not."""
    draw, payoff, tried = random.Random(seed), Payoff(), 0
    for _ in range(600):
        drafted = payoff.allows(1)
        tried += drafted
        slowed = draw.uniform(1, 9) if draw.random() < 1 / 3 else 1
        took = int((1.4 if drafted else 1.0) * slowed * STEP)
        payoff.note(1, drafted=drafted, tokens=3 if drafted else 1, took_ns=took)
    assert tried > 540


def test_steps_that_nobody_has_timed_are_not_judged() -> None:
    payoff = Payoff()
    for _ in range(100):
        assert payoff.allows(2)
        payoff.note(2, drafted=True, tokens=2, took_ns=0)
    assert payoff.gain(2) is None
