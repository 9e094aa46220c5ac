"""Everything that can happen, in any order: invariants hold, texts are right, nothing is lost."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.router.scheduling.harness import World, limits, request
from tgi_trio.errors import Overloaded
from tgi_trio.ipc.messages import SamplingParameters

WORLDS: dict[str, dict[str, Any]] = {
    "reserve": {},
    "reserve, cached": {"prefix_caching": True},
    "grow": {"reserve": False, "ask_ahead": 2, "grant_ahead": 4},
    "grow, cached": {
        "reserve": False,
        "prefix_caching": True,
        "ask_ahead": 2,
        "grant_ahead": 4,
    },
    "grow, cached, drafting": {
        "reserve": False,
        "prefix_caching": True,
        "speculate": 2,
        "ask_ahead": 1,
        "grant_ahead": 3,
        "block_size": 2,
    },
    "grow, states": {
        "reserve": False,
        "prefix_caching": True,
        "ask_ahead": 2,
        "grant_ahead": 4,
        "block_size": 2,
        "state_slots": 9,
    },
    "grow, states, drafting, few slots": {
        "reserve": False,
        "prefix_caching": True,
        "speculate": 2,
        "ask_ahead": 1,
        "grant_ahead": 3,
        "block_size": 1,
        "blocks": 49,
        "state_slots": 5,
    },
    "grow, host": {
        "reserve": False,
        "prefix_caching": True,
        "ask_ahead": 2,
        "grant_ahead": 4,
        "block_size": 2,
        "host_blocks": 40,
    },
    "grow, host, drafting, few places": {
        "reserve": False,
        "prefix_caching": True,
        "speculate": 2,
        "ask_ahead": 1,
        "grant_ahead": 3,
        "block_size": 1,
        "blocks": 49,
        "host_blocks": 7,
    },
    "grow, host, states": {
        "reserve": False,
        "prefix_caching": True,
        "ask_ahead": 2,
        "grant_ahead": 4,
        "block_size": 1,
        "blocks": 49,
        "state_slots": 9,
        "host_blocks": 90,
        "host_slots": 9,
    },
    "grow, host, states, few of all": {
        "reserve": False,
        "prefix_caching": True,
        "speculate": 2,
        "ask_ahead": 1,
        "grant_ahead": 3,
        "block_size": 1,
        "blocks": 49,
        "state_slots": 5,
        "host_blocks": 30,
        "host_slots": 3,
    },
    "grow, blocks of one": {
        "reserve": False,
        "prefix_caching": True,
        "block_size": 1,
        "blocks": 49,
        "ask_ahead": 2,
        "grant_ahead": 4,
    },
}


def world(name: str, **changes: Any) -> World:
    chosen = {
        "blocks": 25,
        "max_batch_size": 6,
        "max_batch_prefill_tokens": 24,
        "token_budget": 12,
        "skip_limit": 2,
        "max_queued_requests": 12,
        **WORLDS[name],
        **changes,
    }
    return World(limits(**chosen), eos_every=17)


def any_request(rng: random.Random, longest: int = 30, **changes: Any) -> Any:
    """A request out of a small world of prompts, so that prefixes meet often."""
    prompt = [rng.randint(2, 3) for _ in range(rng.randint(1, 4))]
    if rng.random() < 0.6:
        prompt = [7, 8, 9, 10, 7, 8, 9, 10][: rng.randint(4, 8)] * 2 + prompt
    max_new = rng.randint(1, max(1, longest - len(prompt)))
    sampling = SamplingParameters(
        ignore_eos=rng.random() < 0.5,
        prompt_logprobs=rng.random() < 0.1,
        adapter=int(rng.random() < 0.1),
    )
    return request(
        prompt,
        max_new,
        sampling=sampling,
        cache_salt="salt" if rng.random() < 0.1 else "",
        priority=rng.choice([0, 0, 0, 1, -1]),
        **changes,
    )


class Machine(RuleBasedStateMachine):
    """Hypothesis chooses what happens next."""

    @initialize(name=st.sampled_from(sorted(WORLDS)), seed=st.integers(0, 1000))
    def start(self, name: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self.world = world(name)

    @rule(patience=st.one_of(st.none(), st.integers(1, 40)), copies=st.integers(1, 3))
    def submit(self, patience: int | None, copies: int) -> None:
        deadline = None if patience is None else self.world.now + patience
        one = any_request(self.rng, deadline=deadline)
        for _ in range(copies):
            try:
                self.world.submit(one)
            except Overloaded as error:
                assert error.retry_after >= 1.0

    @precondition(lambda self: self.world.open)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.world.abort(data.draw(st.sampled_from(sorted(self.world.open))))

    @precondition(lambda self: self.world.open)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.world.finish(data.draw(st.sampled_from(sorted(self.world.open))))

    @precondition(lambda self: self.world.shard.rows)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        self.world.fail(data.draw(st.sampled_from(sorted(self.world.shard.rows))))

    @rule()
    def send(self) -> None:
        self.world.send()

    @rule(count=st.integers(1, 3))
    def apply(self, count: int) -> None:
        self.world.apply(count)

    @precondition(lambda self: self.world.shard.budget)
    @rule()
    def step(self) -> None:
        self.world.step()

    @rule(count=st.integers(1, 3))
    def receive(self, count: int) -> None:
        self.world.receive(count)

    @rule(turns=st.integers(1, 5))
    def turns(self, turns: int) -> None:
        for _ in range(turns):
            self.world.turn()

    @rule()
    def expire(self) -> None:
        self.world.expire()

    @rule()
    def unload(self) -> None:
        self.world.scheduler.evict_adapter(1, self.world.now)

    @rule()
    def crash(self) -> None:
        self.world.crash()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.scheduler.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.run()


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("name", sorted(WORLDS))
def test_five_thousand_random_steps(name: str) -> None:
    rng = random.Random(name)
    here = world(name)
    for step in range(5000):
        choice = rng.random()
        if choice < 0.25 and len(here.open) < 30:
            deadline = here.now + rng.randint(1, 60) if rng.random() < 0.1 else None
            try:
                here.submit(any_request(rng, deadline=deadline))
            except Overloaded:
                here.turn()
        elif choice < 0.30 and here.open:
            here.abort(rng.choice(sorted(here.open)))
        elif choice < 0.32 and here.open:
            here.finish(rng.choice(sorted(here.open)))
        elif choice < 0.33 and here.shard.rows:
            here.fail(rng.choice(sorted(here.shard.rows)))
        elif choice < 0.335:
            here.crash()
        elif choice < 0.5:
            here.send()
        elif choice < 0.65:
            here.apply(rng.randint(1, 3))
        elif choice < 0.8 and here.shard.budget:
            here.step()
        elif choice < 0.95:
            here.receive(rng.randint(1, 3))
        else:
            here.turn()
        here.expire()
        here.scheduler.check()
        if step % 500 == 499:
            here.run()
    here.run()
    counters = here.scheduler.counters
    assert counters["finished"] > 100
    if not here.limits.reserve:
        assert counters["preempted"] > 0
    if here.limits.prefix_caching:
        assert counters["prefix_hit_tokens"] > 0
    if here.limits.host_blocks:
        assert counters["copied_out"] > 100 and counters["copied_back"] > 20
    if here.limits.host_slots:
        assert counters["states_copied_out"] > 50 and counters["states_copied_back"] > 10
