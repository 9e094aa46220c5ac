"""The token budget of a step and the estimate of a wait."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.router.scheduling.harness import limits, request
from tgi_trio.errors import Overloaded
from tgi_trio.ipc.messages import StepReport
from tgi_trio.router.scheduling import Limits, Prefill, Scheduler

DECODE_NS = 10_000_000
TOKEN_NS = 100_000  # what a prompt token adds to a step


class Clocked:
    """A scheduler whose steps take a modelled time; runs decode rows and one endless prompt."""

    def __init__(self, **changes: object) -> None:
        wide = {
            "blocks": 60_000,
            "max_queued_tokens": 10**6,
            "token_budget": 512,
            "max_batch_prefill_tokens": 1024,
            "max_batch_size": 8,
        }
        self.scheduler = Scheduler(limits(**{**wide, **changes}))
        self.budget = 0
        self.steps = 0
        self.token_ns = TOKEN_NS
        self.flat_ns = 0  # that a step with a prompt takes at least
        self.running: dict[int, int] = {}
        self.prompts: dict[int, list[int]] = {}

    def send(self) -> None:
        for command in self.scheduler.schedule(0.0):
            if isinstance(command, Limits):
                self.budget = command.token_budget
            elif isinstance(command, Prefill):
                for row in command.rows:
                    self.prompts[row.sequence] = [0, len(row.token_ids)]

    def step(self) -> tuple[int, int]:
        """Run one step; returns (its prompt tokens, its time in ns)."""
        self.send()
        self.steps += 1
        room = self.budget - len(self.running)
        report = StepReport(self.steps, 10**6, decode_rows=len(self.running))
        for id in self.running:
            self.running[id] += 1
            self._row(report, id, self.running[id], 1)
        shortest_first = sorted(self.prompts.items(), key=lambda item: item[1][1] - item[1][0])
        for id, (computed, length) in shortest_first:
            chunk = min(room, length - computed)
            room -= chunk
            report.prefill_tokens += chunk
            self.prompts[id][0] += chunk
            if chunk:
                self._row(report, id, computed + chunk, int(computed + chunk == length))
            if computed + chunk == length:
                self.running[id] = length
                del self.prompts[id]
        report.forward_ns = DECODE_NS + self.token_ns * report.prefill_tokens
        if report.prefill_tokens:
            report.forward_ns = max(report.forward_ns, self.flat_ns)
        self.scheduler.commit(report, 0.0)
        self.scheduler.check()
        return report.prefill_tokens, report.forward_ns

    def _row(self, report: StepReport, id: int, computed: int, count: int) -> None:
        report.sequence.append(id)
        report.computed.append(computed)
        report.token_count.append(count)
        report.prompt_count.append(0)
        report.finish.append(0)
        report.token_ids += [5] * count
        report.logprobs += [0.0] * count
        report.top_count += [0] * count


def behind_a_long_prompt(decodes: int, **changes: object) -> Clocked:
    """Return what decodes sequences 1 to `decodes`, when it is given a long prompt, 10."""
    clocked = Clocked(**changes)
    for id in range(1, decodes + 1):
        clocked.scheduler.add(id, request(10, 5000), 0.0)
    for _ in range(10):
        clocked.step()
    clocked.scheduler.add(10, request(20_000, 10), 0.0)
    return clocked


def learned(**changes: object) -> Clocked:
    """Return the same with four, when it has learned how long steps take; nobody waits behind."""
    clocked = behind_a_long_prompt(4, **changes)
    for _ in range(20):
        tokens, _ = clocked.step()
    assert tokens < 120
    return clocked


def test_a_prompt_alone_gets_full_steps() -> None:
    clocked = Clocked()
    clocked.scheduler.add(1, request(2000, 500), 0.0)
    assert [clocked.step()[0] for _ in range(3)] == [512, 512, 512]


def test_a_prompt_alone_gets_full_steps_whatever_was_learned() -> None:
    clocked = behind_a_long_prompt(1)
    for _ in range(10):
        tokens, _ = clocked.step()
    assert tokens < 200
    clocked.scheduler.abort(1, 0.0)
    clocked.running.clear()
    for _ in range(2):
        tokens, _ = clocked.step()
    assert tokens == 512


def test_a_long_prompt_stretches_the_steps_of_others_twofold_at_most() -> None:
    clocked = behind_a_long_prompt(1)
    chunks = []
    while 10 not in clocked.running:
        chunks.append(clocked.step())
    times = [ns for _, ns in chunks]
    assert sum(ns > 2.2 * DECODE_NS for ns in times) <= 1  # the one that taught it
    assert sorted(tokens for tokens, _ in chunks)[len(chunks) // 2] > 75  # 100 is what fits


def test_the_share_of_prompts_grows_again_when_there_is_time() -> None:
    clocked = behind_a_long_prompt(1)
    for _ in range(20):
        slow, _ = clocked.step()
    clocked.token_ns = TOKEN_NS // 3
    for _ in range(30):
        fast, _ = clocked.step()
    assert slow < 120 and fast > 250


def test_prompts_get_what_costs_nothing_where_the_fewest_take_too_long() -> None:
    """As on a device, where launching a step with a prompt may take longer than computing it."""
    clocked = behind_a_long_prompt(1)
    clocked.flat_ns = 4 * DECODE_NS
    chunks = [clocked.step() for _ in range(30)]
    assert min(tokens for tokens, _ in chunks[10:]) >= 240  # 300 tokens take no longer than one
    assert {ns for _, ns in chunks[10:]} == {clocked.flat_ns}


def test_prompts_that_cost_what_they_are_long_get_the_fewest_where_those_take_too_long() -> None:
    clocked = behind_a_long_prompt(1)
    clocked.token_ns = 10 * TOKEN_NS
    chunks = [clocked.step() for _ in range(50)]
    fewest = [tokens for tokens, _ in chunks if tokens <= 48]
    assert len(fewest) >= len(chunks) - 4  # those that taught it


def test_a_queue_for_memory_does_not_get_full_steps() -> None:
    # 20,040 and 20,009 tokens of 40,396
    clocked = behind_a_long_prompt(4, blocks=10_100, max_waiting_tokens=3)
    clocked.scheduler.add(11, request(500, 10), 0.0)
    chunks = [clocked.step()[0] for _ in range(30)]
    assert clocked.scheduler.queue_size == 1
    assert max(chunks[3:]) < 200


@pytest.mark.parametrize(("target", "least", "most"), [(0.05, 260, 320), (0.2, 900, 1024)])
def test_many_that_wait_get_steps_as_long_as_the_target_allows(
    target: float, least: int, most: int
) -> None:
    clocked = learned(waiting_served_ratio=0.5, target_itl=target)
    for id in range(11, 14):
        clocked.scheduler.add(id, request(20_000, 10), 0.0)
    steps = [clocked.step() for _ in range(12)]
    assert least <= steps[-1][0] <= most
    assert max(ns for _, ns in steps) <= target * 1e9


def test_few_that_wait_get_one_such_step_after_every_max_waiting_tokens() -> None:
    clocked = learned(waiting_served_ratio=1000.0, max_waiting_tokens=9)
    clocked.scheduler.add(11, request(20_000, 10), 0.0)
    tokens = [clocked.step()[0] for _ in range(40)]
    large = [step for step, count in enumerate(tokens) if count > 200]
    assert len(large) == 4
    assert {after - before for before, after in pairwise(large)} == {10}


def test_a_deadline_that_the_queue_does_not_allow_is_refused_at_once() -> None:
    scheduler = Scheduler(limits(max_batch_size=1))
    with pytest.raises(Overloaded, match="deadline"):
        scheduler.add(0, request(5, deadline=10.0), 10.0)
    for id in range(1, 40):
        scheduler.add(id, request(10, 1), 0.0)
    for step in range(1, 5):  # one request of 10 tokens a second leaves the queue
        scheduler.schedule(float(step))
        id = step
        scheduler.commit(
            StepReport(step, 100, sequence=[id], computed=[10], token_count=[1], prompt_count=[0],
                       finish=[1], token_ids=[5], logprobs=[0.0], top_count=[0]),
            float(step),
        )  # fmt: skip
    with pytest.raises(Overloaded, match="deadline") as caught:
        scheduler.add(50, request(5, deadline=20.0), 5.0)
    assert 30.0 < caught.value.retry_after < 40.0
    scheduler.add(51, request(5, deadline=100.0), 5.0)
