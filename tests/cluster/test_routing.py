"""The longest known prefix wins unless its replica is busy; chance and load decide the rest."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tgi_trio.cluster.routing import CHOICES, OWNERS, Routing

CHAIN = (b"1", b"12", b"123")


def routing(*names: str, heads: int = 100) -> Routing:
    made = Routing(random.Random(1), heads)
    for name in names:
        made.add(name)
        made.report(name, requests=0, slots=8)
    return made


def test_who_has_the_longest_part_of_a_prompt_gets_it() -> None:
    replicas = routing(*"abcdef")
    replicas.sent("c", CHAIN[:1])
    replicas.sent("e", CHAIN[:2])
    for name in "ce":
        replicas.finished(name)
    assert {replicas.order((*CHAIN, b"more"))[0] for _ in range(20)} == {"e"}
    assert {replicas.order((b"1", b"19"))[0] for _ in range(20)} == {"e"}  # the later of the two
    assert len({replicas.order((b"2",))[0] for _ in range(50)}) > 1


def test_a_busy_replica_gives_its_prefix_away() -> None:
    replicas = routing("a", "b")
    replicas.sent("a", CHAIN)
    assert replicas.order(CHAIN) == ["a", "b"]
    replicas.report("a", requests=9, slots=8)
    assert replicas.order(CHAIN) == ["b", "a"]
    replicas.report("b", requests=8, slots=8)  # then waiting for the prefix is cheaper
    assert replicas.order(CHAIN) == ["a", "b"]
    replicas.report("a", requests=9, slots=64)
    assert replicas.order(()) == ["a", "b"]  # so many are few for its size


def test_own_requests_count_before_a_replica_reports_them() -> None:
    replicas = routing("a", "b")
    for _ in range(3):
        replicas.sent("a", ())
    assert replicas.order(())[0] == "b"
    for _ in range(4):
        replicas.learn("b", ())  # another front's
    assert replicas.order(())[0] == "a"
    replicas.report("a", requests=3, slots=8)
    replicas.report("b", requests=2, slots=8)  # two of four ended
    assert replicas.order(())[0] == "b"
    for _ in range(3):
        replicas.finished("a")
    assert replicas.order(())[0] == "a"


def test_names_are_few_and_each_comes_once() -> None:
    replicas = routing(*map(str, range(100)))
    replicas.sent("7", CHAIN)
    order = replicas.order(CHAIN)
    assert order[0] == "7" and len(order) == len(set(order)) == CHOICES
    few = routing("a", "b", "c")
    assert sorted(few.order(CHAIN)) == ["a", "b", "c"]
    assert routing().order(CHAIN) == []


def test_load_spreads_over_replicas_that_nobody_reports_on() -> None:
    replicas = routing(*map(str, range(50)))
    got: Counter[str] = Counter()
    for _ in range(500):
        first = replicas.order(())[0]
        replicas.sent(first, ())
        got[first] += 1
    assert max(got.values()) <= 14  # 10 on average; drawn at random it would be about 18


def test_a_suspended_replica_keeps_its_prefixes_and_a_removed_one_does_not() -> None:
    replicas = routing("a", "b")
    replicas.sent("a", CHAIN)
    replicas.finished("a")
    replicas.suspend("a")
    replicas.suspend("a")
    assert replicas.order(CHAIN) == ["b"] and len(replicas) == 1
    replicas.readmit("a")
    assert {replicas.order(CHAIN)[0] for _ in range(20)} == {"a"}
    replicas.remove("a")
    assert "a" not in replicas and replicas.order(CHAIN) == ["b"]
    replicas.add("a")
    assert {replicas.order(CHAIN)[0] for _ in range(50)} == {"a", "b"}
    replicas.sent("b", CHAIN)
    replicas.check()


def test_requests_of_a_removed_replica_may_still_end() -> None:
    replicas = routing("a", "b")
    for _ in range(3):
        replicas.sent("a", CHAIN)
    replicas.remove("a")
    replicas.finished("a")
    replicas.report("a", requests=1, slots=8)  # late, and of nobody
    replicas.learn("a", CHAIN)
    replicas.add("a")
    assert replicas.order(())[0] == "b"  # two of its own are still there
    replicas.finished("a")
    replicas.finished("a")
    with pytest.raises(ValueError, match="no request is left at a"):
        replicas.finished("a")
    with pytest.raises(ValueError, match="there already"):
        replicas.add("a")
    with pytest.raises(KeyError):
        replicas.sent("nobody", CHAIN)


def test_memory_is_bounded_and_the_newest_is_kept() -> None:
    replicas = routing(*"abcdefgh", heads=4)
    for name in "abcdef":
        replicas.sent(name, (b"1",))
        replicas.finished(name)
    for name in "abc":  # the first has room for four, so it is gone
        replicas.suspend(name)
    assert {replicas.order((b"1",))[0] for _ in range(20)} <= set("cdef")
    for head in range(10):
        replicas.sent("h", (bytes([head]),))
        replicas.finished("h")
    replicas.check()
    assert {replicas.order((b"\x09",))[0] for _ in range(20)} == {"h"}
    assert len({replicas.order((b"1",))[0] for _ in range(50)}) > 1  # forgotten
    assert OWNERS == 4


class AnyLife(RuleBasedStateMachine):
    """Whatever happens in whatever order: the books agree, and only who is there is named."""

    def __init__(self) -> None:
        super().__init__()
        self.routing = Routing(random.Random(0), heads=12)
        self.there: set[str] = set()
        self.resting: set[str] = set()
        self.under_way: list[str] = []

    names = st.sampled_from([f"r{i}" for i in range(12)])
    chains = st.lists(st.integers(0, 3), max_size=4).map(
        lambda parts: tuple(bytes(parts[: i + 1]) for i in range(len(parts)))
    )

    @rule(name=names)
    def add_or_remove(self, name: str) -> None:
        if name in self.there:
            self.routing.remove(name)
            self.there.discard(name)
            self.resting.discard(name)
        else:
            self.routing.add(name)
            self.there.add(name)

    @rule(name=names)
    def rest_or_return(self, name: str) -> None:
        if name in self.resting:
            self.routing.readmit(name)
            self.resting.discard(name)
        elif name in self.there:
            self.routing.suspend(name)
            self.resting.add(name)

    @rule(chain=chains)
    def send(self, chain: tuple[bytes, ...]) -> None:
        order = self.routing.order(chain)
        given = self.there - self.resting
        assert len(order) == len(set(order)) == min(CHOICES, len(given)) and set(order) <= given
        for name in order[:1]:
            self.routing.sent(name, chain)
            self.under_way.append(name)

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.under_way) - 1))
        self.routing.finished(self.under_way.pop(at))

    @rule(name=names, running=st.integers(0, 9), waiting=st.integers(0, 9), chain=chains)
    def hear(self, name: str, running: int, waiting: int, chain: tuple[bytes, ...]) -> None:
        self.routing.report(name, requests=running + waiting, slots=4)
        self.routing.learn(name, chain)

    @invariant()
    def books_agree(self) -> None:
        self.routing.check()
        assert len(self.routing) == len(self.there - self.resting)


TestAnyLife = AnyLife.TestCase
TestAnyLife.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)


def test_what_others_send_is_not_counted_where_a_replica_never_reports() -> None:
    replicas = Routing(random.Random(3))
    for name in ("a", "b"):
        replicas.add(name)
    for _ in range(1000):
        replicas.learn("a", CHAIN)
    assert replicas.order(CHAIN)[0] == "a"  # its prefix counts, and it is no busier for ever
    replicas.check()
