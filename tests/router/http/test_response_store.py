"""Responses that are kept: how much, which are forgotten, whose they are."""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import dataclass

import pytest

from tgi_trio.router.http import response_store
from tgi_trio.router.http.response_store import (
    ItemIds,
    ResponseStore,
    StoredConversation,
    StoredResponse,
    StoredTurn,
)


@dataclass
class Told:
    """What the test remembers of a response."""

    caller: bytes
    lists: list[bytes]
    item: str


def response(id: str, before: StoredTurn | None = None, caller: bytes = b"a", size: int = 10):
    """Return a response whose item is called as itself."""
    turn = StoredTurn(before, b"given %b" % id.encode(), b"." * size)
    return StoredResponse(id, caller, b"body", turn, ItemIds.of([f"item of {id}"]))


@pytest.mark.parametrize("most", [2000, 9000, 40_000])
@pytest.mark.parametrize("seed", range(6))
def test_what_is_found_is_what_was_kept(most: int, seed: int) -> None:
    source = random.Random(seed)
    store = ResponseStore(most)
    all_told: dict[str, Told] = {}
    found_once = 0
    for number in range(400):
        id, caller = f"r{number}", source.choice((b"a", b"b"))
        before = None
        lists: list[bytes] = []
        known = source.choice([*all_told, "none"])
        if (earlier := store.find(known, caller)) is not None:
            assert all_told[known].caller == caller
            before, lists = earlier.turn, all_told[known].lists
            found_once += 1
        one = response(id, before, caller, source.choice((10, 700, 3000)))
        store.keep(one)
        store.check()
        all_told[id] = Told(caller, [*lists, one.turn.given, one.turn.answered], f"item of {id}")
        for name, told in source.sample(sorted(all_told.items()), min(5, len(all_told))):
            found = store.find(name, told.caller)
            assert store.find(name, b"c") is None
            assert (found is None) == (store.find_by_item(told.item, told.caller) is None)
            if found is not None:
                assert found.turn.lists() == told.lists
                assert found.turn.input_lists() == told.lists[:-1]
        if source.random() < 0.2:
            name = source.choice(sorted(all_told))
            there = store.find(name, all_told[name].caller) is not None
            assert not store.forget(name, b"c")
            assert store.forget(name, all_told[name].caller) == there
            store.check()
    assert found_once or most == 2000
    for name, told in all_told.items():
        store.forget(name, told.caller)
    assert (store.responses, store.used) == (0, 0)


def test_what_was_used_last_is_forgotten_last() -> None:
    store = ResponseStore(3 * response("a").size + 100)
    for id in "abc":
        store.keep(response(id))
    assert store.find("a", b"a") is not None
    store.keep(response("d"))
    assert [id for id in "abcd" if store.find(id, b"a")] == ["a", "c", "d"]


def test_a_conversation_is_whole_though_its_beginning_is_forgotten() -> None:
    store = ResponseStore()
    turn = None
    for number in range(3000):  # deeper than calls can be nested
        one = response(f"r{number}", turn)
        store.keep(one)
        turn = one.turn
    for number in range(2999):
        assert store.forget(f"r{number}", b"a")
    store.check()
    last = store.find("r2999", b"a")
    assert last is not None and len(last.turn.lists()) == 6000
    store.forget("r2999", b"a")
    assert store.used == 0


def test_a_turn_that_was_forgotten_while_the_next_was_written_counts_again() -> None:
    store = ResponseStore()
    first = response("r1")
    second = response("r2", first.turn)
    store.keep(first)
    store.keep(second)
    third = response("r3", second.turn)
    store.forget("r1", b"a")
    store.forget("r2", b"a")
    assert store.used == 0
    store.keep(third)
    store.check()
    assert store.used == third.size + sum(x.turn.size for x in (first, second, third))


def test_an_item_is_found_in_the_last_response_that_has_it() -> None:
    store = ResponseStore()
    store.keep(StoredResponse("r1", b"a", b"", StoredTurn(None, b"", b""), ItemIds.of("x")))
    store.keep(StoredResponse("r2", b"a", b"", StoredTurn(None, b"", b""), ItemIds.of("x")))
    store.keep(StoredResponse("r3", b"b", b"", StoredTurn(None, b"", b""), ItemIds.of("x")))
    store.forget("r1", b"a")
    found = store.find_by_item("x", b"a")
    assert found is not None and found.id == "r2"


def _indexed(store: ResponseStore) -> dict[str, set[str]]:
    """Return the items by response that are in an index."""
    found: dict[str, set[str]] = {}
    for (_, item), ids in store._of_items.items():
        for id in ids:
            found.setdefault(id, set()).add(item)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_items_of_responses_with_many_are_found_as_those_with_few(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those with many are in no index: with 130,000 items it took the loop 100 ms to write."""
    monkeypatch.setattr(response_store, "_INDEXED", 3)
    source = random.Random(seed)
    store, told = ResponseStore(20_000), list[StoredResponse]()
    for number in range(300):
        turn = StoredTurn(None, b"", b"." * source.randrange(900))
        items = source.choices("abcdefgh", k=source.randrange(7))
        ids = ItemIds.of(items).answer(source.choices("hijkl", k=2))
        one = StoredResponse(f"r{number}", source.choice((b"a", b"b")), b"", turn, ids)
        store.keep(one)
        store.check()
        assert all(len(each) <= 3 for each in _indexed(store).values())
        told.append(one)
        if source.random() < 0.2:
            gone = source.choice(told)
            store.forget(gone.id, gone.caller)
            store.check()
        told = [each for each in told if store.find(each.id, each.caller) is not None]
        for item in "abchl":
            for caller in (b"a", b"b"):
                own = [each for each in told if each.caller == caller and item in each.item_ids]
                assert store.find_by_item(item, caller) is (own[-1] if own else None)


def test_an_item_is_found_while_any_response_has_it() -> None:
    """A client may name it in later requests, and delete the responses to these."""
    store = ResponseStore()
    store.keep(StoredResponse("r1", b"a", b"", StoredTurn(None, b"", b""), ItemIds.of("x")))
    store.keep(
        StoredResponse("r2", b"a", b"", StoredTurn(None, b"", b""), ItemIds.of("x").answer("x"))
    )
    store.forget("r2", b"a")
    found = store.find_by_item("x", b"a")
    assert found is not None and found.id == "r1"
    store.check()
    store.forget("r1", b"a")
    assert store.find_by_item("x", b"a") is None
    store.check()


def test_one_that_is_too_large_takes_no_others_along() -> None:
    store = ResponseStore(10_000)
    first = response("r1")
    store.keep(first)
    second = response("r2", size=6000)
    store.keep(second)
    store.keep(response("r3", size=10_000))
    store.keep(response("r4", second.turn, size=4000))  # its whole conversation is
    assert [id for id in ("r1", "r2", "r3", "r4") if store.find(id, b"a")] == ["r1", "r2"]
    store.check()


@pytest.mark.parametrize("items", [1, 20, 1000])
def test_small_ones_take_no_more_memory_than_is_counted(items: int) -> None:
    store, before = ResponseStore(), 0
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(4000 // items):
            turn = StoredTurn(None, bytes(60), bytes(60))
            ids = ItemIds.of(f"msg_{number:024d}{i:024d}" for i in range(items))
            store.keep(StoredResponse(f"resp_{number:048d}", bytes(32), bytes(99), turn, ids))
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert taken < store.used


def test_nothing_is_kept_where_nothing_may_be() -> None:
    store = ResponseStore(0)
    store.keep(response("r1"))
    assert (store.responses, store.used) == (0, 0)
    store = ResponseStore(100)
    store.keep(response("r1", size=1000))
    assert (store.responses, store.used) == (0, 0)
    store.check()


@pytest.mark.parametrize("seed", range(4))
def test_conversations_are_what_was_done_to_them(seed: int) -> None:
    """Beside responses, of which each may be what is forgotten."""
    source = random.Random(seed)
    store = ResponseStore(30_000)
    told: dict[str, dict[str, bytes]] = {}
    for number in range(600):
        store.keep(response(f"r{number}", size=source.choice((10, 900))))
        if source.random() < 0.1:
            id = f"c{number}"
            told[id] = {}
            store.keep_conversation(StoredConversation(id, b"a", 5))
        for id, items in source.sample(sorted(told.items()), min(2, len(told))):
            found = store.find_conversation(id, b"a")
            if found is None:
                del told[id]
                continue
            assert found.items == items and list(found.items) == list(items)
            match source.randrange(3):
                case 0:
                    added = {f"i{source.randrange(9)}": b"x" * source.randrange(800)}
                    items |= added
                    store.add_items(found, added)
                case 1 if items:
                    gone = source.choice(sorted(items))
                    del items[gone]
                    store.remove_item(found, gone)
                case _:
                    store.describe_conversation(found, b"." * source.randrange(300))
            assert store.find_conversation(id, b"b") is None and store.find(id, b"a") is None
        store.check()
    assert told and store.responses


def test_what_runs_is_never_forgotten_for_others() -> None:
    store = ResponseStore(5000)
    assert store.reserve(3000) and not store.reserve(2001)
    store.keep(response("one"))
    store.keep(response("two"))
    assert store.find("one", b"a") is None and store.find("two", b"a") is not None
    store.check()
    assert store.reserve(2000) and store.find("two", b"a") is None
    store.check()
    store.release(5000)
    assert store.used == 0


def test_a_conversation_that_finds_no_room_beside_what_runs_is_counted_nowhere() -> None:
    store = ResponseStore(4000)
    assert store.reserve(3900)
    for number in range(9):
        conversation = StoredConversation(f"c{number}", b"a", 5)
        store.keep_conversation(conversation)
        store.describe_conversation(conversation, b'{"topic":"a"}')
        store.add_items(conversation, {"i": b"{}"})
        store.check()
    assert store.used == 3900 and store.find_conversation("c0", b"a") is None
