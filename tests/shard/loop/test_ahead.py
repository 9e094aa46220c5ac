"""A runner that keeps tokens until they are asked for: the next step is launched before."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.shard.loop.scripted_router import (
    BLOCK,
    PROMPT,
    answer,
    fake_shard,
    row,
)
from tgi_trio.ipc.messages import StateGrant
from tgi_trio.shard.contract import StepPlan, StepResult
from tgi_trio.shard.runner import DraftRow, Pending
from tgi_trio.shard.speculation.payoff import Payoff
from tgi_trio.testing.fake_model import FakeRunner


class Journal:
    """What was launched and what was read, in order, by the length of a step's first row."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entries: list[tuple[str, int]] = []
        launch, journal = FakeRunner.launch, self.entries

        class Noted:
            def __init__(self, pending: Pending, place: int) -> None:
                self.pending, self.place = pending, place

            def proceed(self) -> None:
                journal.append(("went on", self.place))
                self.pending.proceed()

            def result(self) -> StepResult:
                journal.append(("read", self.place))
                return self.pending.result()

        def noted(self: FakeRunner, plan: StepPlan) -> Pending:
            place = int(plan.context_lengths[0])
            journal.append(("launched", place))
            return Noted(launch(self, plan), place)

        monkeypatch.setattr(FakeRunner, "launch", noted)


def test_a_step_is_launched_before_the_one_before_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(monkeypatch)
    with fake_shard(runs_ahead=True) as (router, _):
        router.prefill(row(1, PROMPT, 4))
        router.finished(1)
        assert router.tokens(1) == answer(PROMPT, 4)
    expected = [("launched", 3), ("went on", 3)]
    for n in range(4, 7):  # what needs the token before goes on once that has been read
        expected += [("launched", n), ("read", n - 1), ("went on", n)]
    assert journal.entries == [*expected, ("read", 6)]


def test_a_step_whose_tokens_are_needed_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(monkeypatch)
    with fake_shard() as (router, _):
        router.prefill(row(1, PROMPT, 3))
        router.finished(1)
    names = [name for name, _ in journal.entries]
    assert names == ["launched", "read"] * 3


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    eos_after=st.integers(0, 5),
    joins=st.integers(0, 3),
)
def test_answers_are_those_of_step_by_step(lengths: list[int], eos_after: int, joins: int) -> None:
    """Rows end by EOS and by length while the next step has been launched with them; others join,
    and rows wait for blocks."""
    found = []
    for ahead in (False, True):
        with fake_shard(runs_ahead=ahead, eos_after=eos_after) as (router, _):
            router.prefill(*(row(i, [i + 9, 5], n) for i, n in enumerate(lengths, 1)))
            for j in range(joins):
                router.step()
                router.prefill(row(50 + j, [90 + j], 4))
            ids = [*range(1, len(lengths) + 1), *range(50, 50 + joins)]
            router.finished(*ids)
            found.append({i: (router.tokens(i), router.finish(i)) for i in ids})
    assert found[0] == found[1]


def test_a_row_at_the_end_of_its_blocks_waits_for_more() -> None:
    with fake_shard(runs_ahead=True) as (router, _):
        prompt = list(range(10, 10 + BLOCK - 1))
        router.prefill(row(1, prompt, 8, blocks=(1,)))
        router.until(lambda report: report.stalled_rows == 1)
        router.extend(1, 2, 3)
        router.finished(1)
        assert router.tokens(1) == answer(prompt, 8)


def test_a_row_that_leaves_is_void_in_the_step_that_flies() -> None:
    with fake_shard(runs_ahead=True, step_ms=5) as (router, _):
        router.prefill(row(1, PROMPT, 50), row(2, [8, 9], 40))
        router.step()
        gone = router.acknowledged(router.filter(1))
        router.finished(2)
        later = router.reports[router.reports.index(gone) + 1 :]
        assert not any(1 in report.sequence for report in later)
        assert router.tokens(2) == answer([8, 9], 40)
        router.prefill(row(3, PROMPT, 5))  # in the blocks that have become free
        router.finished(3)
        assert router.tokens(3) == answer(PROMPT, 5)


@pytest.mark.parametrize("culprit", [1, 3, 5])
def test_a_row_that_raises_fails_alone_whatever_was_launched_upon_it(culprit: int) -> None:
    prompts = {i: [i + 10, 666 if i == culprit else 5] for i in range(1, 6)}
    with fake_shard(runs_ahead=True, fail_token=666) as (router, _):
        router.prefill(row(9, PROMPT, 30))
        router.step()
        router.prefill(*(row(i, prompt, 6) for i, prompt in prompts.items()))
        router.finished(9, *prompts)
        for i, prompt in prompts.items():
            assert router.tokens(i) == ([] if i == culprit else answer(prompt, 6))
        assert "token 666 cannot be computed" in (router.fault(culprit) or "")
        assert router.tokens(9) == answer(PROMPT, 30)
        steps = [report.step for report in router.reports if len(report.sequence)]
        assert steps == sorted(set(steps))


@pytest.mark.parametrize("where", ["launch", "proceed"])
def test_a_step_that_cannot_be_launched_at_once_is_computed_when_its_tokens_are_known(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Nothing may be launched upon it meanwhile: its tokens would be those of nobody."""
    failed: list[int] = []

    def fail_once(plan: StepPlan) -> None:
        if not failed and plan.inputs is not None and plan.context_lengths[0] == 6:
            failed.append(1)
            raise RuntimeError("out of memory, this once")

    launch = FakeRunner.launch

    def failing(self: FakeRunner, plan: StepPlan) -> Pending:
        if where == "launch":
            fail_once(plan)
        pending = launch(self, plan)
        if where == "proceed":
            monkeypatch.setattr(type(pending), "proceed", lambda own: fail_once(own.plan))
        return pending

    monkeypatch.setattr(FakeRunner, "launch", failing)
    with fake_shard(runs_ahead=True) as (router, _):
        router.prefill(row(1, PROMPT, 9))
        router.finished(1)
        assert failed and router.tokens(1) == answer(PROMPT, 9)


def test_states_of_steps_that_follow_at_once_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner faults whoever reads a state that is not of the tokens before."""
    journal = Journal(monkeypatch)
    with fake_shard(runs_ahead=True, state_slots=8) as (router, _):
        router.prefill(*(row(i, [i, 7], 9, states=StateGrant((2 * i, 2 * i + 1))) for i in (1, 2)))
        router.finished(1, 2)
        assert [router.tokens(i) for i in (1, 2)] == [answer([i, 7], 9) for i in (1, 2)]
    assert [what for what, _ in journal.entries[:4]] == ["launched", "went on", "launched", "read"]


class Foretelling:
    """Drafts two tokens that will be said, but for every third, which is another."""

    def __init__(self, answers: dict[int, list[int]]) -> None:
        self.answers = answers
        self.made = 0

    def draft_rows(self, rows: Sequence[DraftRow], spare: int) -> dict[int, int]:
        counts = {}
        for place, sequence, room in rows:
            said = sequence.length - sequence.prompt_length
            coming = self.answers[sequence.id][said : said + max(0, min(2, room, spare))]
            for i, token in enumerate(coming):
                self.made += 1
                sequence.token_ids[sequence.length + i] = token + (self.made % 3 == 0)
            if coming:
                counts[place] = len(coming)
            spare -= len(coming)
        return counts


def test_steps_follow_at_once_while_drafting_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a step with drafts waits for the tokens before it."""
    asked = [0]

    def rests(at: int) -> bool:
        return at % 8 >= 3

    def allows(self: Payoff, rows: int) -> bool:
        asked[0] += 1
        return not rests(asked[0])

    monkeypatch.setattr(Payoff, "allows", allows)
    monkeypatch.setattr(Payoff, "is_resting", lambda self, rows: rests(asked[0] + 1))
    journal = Journal(monkeypatch)
    answers = {1: answer(PROMPT, 60), 2: answer([8, 9], 60)}
    drafter = Foretelling(answers)
    monkeypatch.setattr(FakeRunner, "drafter", lambda self, most: drafter)
    with fake_shard(runs_ahead=True, speculate=2) as (router, _):
        router.prefill(row(1, PROMPT, 60), row(2, [8, 9], 60))
        router.finished(1, 2)
        assert {i: router.tokens(i) for i in answers} == answers
    assert drafter.made > 8
    flying, launched_upon = 0, [0, 0]  # steps launched behind none that is not read, behind one
    for what, _ in journal.entries:
        if what == "launched":
            launched_upon[flying] += 1
        flying += {"launched": 1, "read": -1}.get(what, 0)
    assert min(launched_upon) > 5
