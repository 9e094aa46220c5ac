"""Who brings the shard down is found, and costs nobody else a token."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.router.scheduling.harness import limits, request
from tgi_trio.ipc.messages import StepReport
from tgi_trio.router.scheduling import Prefill, Scheduler
from tgi_trio.router.scheduling.isolation import DEATHS, TOKENS
from tgi_trio.router.scheduling.lifecycle import SequenceState

NEW_TOKENS = TOKENS + 4


class Frail:
    """A shard that dies in the step in which one of `culprits` gets its `fatal`-th token."""

    def __init__(
        self, count: int, culprits: set[int], fatal: int, new_tokens: int = NEW_TOKENS
    ) -> None:
        self.scheduler = Scheduler(limits(blocks=2000, max_batch_size=64, token_budget=512))
        self.culprits = culprits
        self.fatal = fatal
        self.new_tokens = new_tokens
        self.known: dict[int, int] = {}  # sequence: its length
        self.deaths = 0
        self.steps = 0
        self.failed: list[int] = []
        self.tokens = dict.fromkeys(range(count), 0)
        for id in range(count):
            self.scheduler.add(id, request(5, new_tokens), 0.0)

    def send(self) -> None:
        for command in self.scheduler.schedule(0.0):
            if isinstance(command, Prefill):
                self.known |= {row.sequence: len(row.token_ids) for row in command.rows}

    def step(self) -> None:
        self.send()
        self.steps += 1
        if any(self.tokens[id] + 1 >= self.fatal for id in self.culprits & self.known.keys()):
            self.die()
            return
        report = StepReport(self.steps, 1 << 30, sequence=list(self.known))
        rows = len(self.known)
        report.computed = list(self.known.values())
        report.token_count, report.token_ids = [1] * rows, [5] * rows
        report.prompt_count = report.top_count = [0] * rows
        report.logprobs = [0.0] * rows
        report.finish = [int(self.tokens[id] + 1 == self.new_tokens) for id in self.known]
        for progress in self.scheduler.commit(report, 0.0):
            self.tokens[progress.sequence_id] += 1
            self.known[progress.sequence_id] += 1
            if progress.finish:
                del self.known[progress.sequence_id]
        self.scheduler.check()

    def die(self) -> None:
        self.deaths += 1
        self.known.clear()
        self.failed += self.scheduler.shard_lost(0.0)
        self.scheduler.check()

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.queue_size or self.scheduler.batch_size)


@settings(max_examples=60)
@given(st.integers(1, 40), st.data())
def test_the_culprits_fail_and_nobody_else_loses_a_token(count: int, data: st.DataObject) -> None:
    culprits = data.draw(st.sets(st.integers(0, count - 1), max_size=3))
    frail = Frail(count, culprits, data.draw(st.integers(1, NEW_TOKENS)))
    while frail.busy:
        frail.step()
    assert set(frail.failed) == culprits and len(frail.failed) == len(culprits)
    for id, tokens in frail.tokens.items():
        assert tokens == (frail.fatal - 1 if id in culprits else NEW_TOKENS)
    assert frail.deaths <= len(culprits) * (DEATHS + math.log2(count) + 1)


def test_an_operator_who_kills_the_shard_convicts_nobody_that_gets_further() -> None:
    frail = Frail(1, set(), fatal=1, new_tokens=6 * TOKENS)
    for _ in range(4):
        for _ in range(TOKENS):
            frail.step()
        frail.die()
    while frail.busy:
        frail.step()
    assert frail.failed == [] and frail.tokens == {0: 6 * TOKENS}


def test_newcomers_do_not_join_suspects_and_come_after_them() -> None:
    frail = Frail(4, {1}, fatal=1)
    while not frail.scheduler.loss_explained:
        frail.step()
    frail.scheduler.add(9, request(5, 1), 0.0)
    frail.tokens[9] = 0
    frail.send()
    newcomer = frail.scheduler.find(9)
    assert newcomer is not None and newcomer.state is SequenceState.WAITING
    assert frail.scheduler.batch_size == 2  # half of the four that died with the shard
    deaths = frail.deaths
    while frail.busy:
        frail.step()
    assert frail.failed == [1] and frail.deaths - deaths <= 3
    assert newcomer.deaths == 0


@pytest.mark.parametrize("alone", [True, False])
def test_a_loss_is_explained_only_when_a_sequence_can_have_done_it(alone: bool) -> None:
    frail = Frail(1 if alone else 5, {0}, fatal=1)
    explained = []
    while frail.busy:
        deaths = frail.deaths
        frail.step()
        if frail.deaths > deaths:
            explained.append(frail.scheduler.loss_explained)
    assert explained[0] is False and all(explained[1:]) and frail.failed == [0]
