"""Keeps responses in memory, so that later requests can go on from them.

A response is found by its id, and each item of its conversation by the item's. What is used least
recently is forgotten first, once all of it together is larger than --response-store-bytes.

Responses that are still computed, and conversations, are counted as well and found by their ids.

A conversation is a chain of turns: `resp_2`, which went on from `resp_1`, holds what it added and
the turn before. A response can be forgotten while later ones still need its turn.

    resp_1 ──▶ turn 1 ◀── turn 2 ◀── resp_2
                  ▲
                  └────── turn 3 ◀── resp_3
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar
from weakref import ref

from tgi_trio.router.http.event_log import EventLog

Key = TypeVar("Key")

_RECORD = 1024  # bytes that are counted for a response beside its texts: objects, keys of indexes
_ITEM = 384  # the same for each of its items
# Most items of a response that are found by an index: it is written on the loop, a microsecond
# each. Responses with more are looked through; there are few of them, as memory is bounded.
_INDEXED = 4096


@dataclass(slots=True, eq=False, weakref_slot=True)
class StoredTurn:
    """What one request added to a conversation, as JSON lists of items."""

    before: StoredTurn | None
    given: bytes
    answered: bytes
    holders: int = 0  # responses and later turns that need it; counted by the store

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.given) + len(self.answered)

    def measure(self) -> int:
        """Return the bytes of the whole conversation, up to the end of this turn."""
        return sum(map(len, self.lists()))

    def lists(self) -> list[bytes]:
        """Return the lists that are the whole conversation, up to the end of this turn."""
        return [*self.input_lists(), self.answered]

    def input_lists(self) -> list[bytes]:
        """Return the lists that were answered in this turn: the conversation before its answer."""
        found, turn = [self.given], self.before
        while turn is not None:
            found += [turn.answered, turn.given]
            turn = turn.before
        return found[::-1]


@dataclass(frozen=True, slots=True)
class ItemIds:
    """The ids of a response's items; those that were given may be many."""

    given: Collection[str] = ()  # a set if they are many
    answered: tuple[str, ...] = ()
    size: int = 0  # bytes that are counted for them

    @classmethod
    def of(cls, given: Iterable[str]) -> ItemIds:
        """Return the ids of what was given; takes a microsecond each."""
        ids = tuple(given)
        return cls(frozenset(ids) if len(ids) > _INDEXED else ids, (), _measure(ids))

    def answer(self, answered: Iterable[str]) -> ItemIds:
        """Return them with the ids of what was answered."""
        ids = tuple(answered)
        return ItemIds(self.given, ids, self.size + _measure(ids))

    def __len__(self) -> int:
        return len(self.given) + len(self.answered)

    def __contains__(self, id: str) -> bool:
        return id in self.given or id in self.answered

    def each(self) -> set[str]:
        """Return all of them, each once."""
        return {*self.given, *self.answered}


def _measure(ids: Collection[str]) -> int:
    return sum(map(len, ids)) + _ITEM * len(ids)


NO_ITEMS: Final = ItemIds()


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response that is kept."""

    id: str
    caller: bytes  # whose it is: `api_keys.name_caller`
    body: bytes  # as the client got it
    turn: StoredTurn
    item_ids: ItemIds = NO_ITEMS  # of what was given and answered
    background: bool = False
    log: EventLog | None = None  # its events, all of them, if they may be read again

    @property
    def size(self) -> int:
        """Bytes, without those of its turn."""
        read_again = 0 if self.log is None else self.log.size
        return len(self.body) + _RECORD + self.item_ids.size + read_again


@dataclass(slots=True, eq=False)
class StoredConversation:
    """A conversation that is kept: items that clients and responses add, and clients remove.

    Only the store changes it.
    """

    id: str
    caller: bytes
    created: int  # Unix seconds
    metadata: bytes = b"{}"
    items: dict[str, bytes] = field(default_factory=dict)  # JSON by id, in order
    size: int = _RECORD  # bytes
    # Of the last response, where its turn and those before it are all that is there.
    turn: ref[StoredTurn] | None = None


def measure_items(conversation: StoredConversation, items: Mapping[str, bytes]) -> int:
    """Return how many bytes more a conversation takes with items, JSON by id, added to it."""
    known = [conversation.items[id] for id in items if id in conversation.items]
    old = sum(_ITEM + len(each) for each in known)
    return sum(_ITEM + len(each) for each in items.values()) - old


class RunningResponse(Protocol):
    """A response that is being computed in the background."""

    id: str
    caller: bytes
    turn: StoredTurn  # without its answer
    log: EventLog | None

    def show(self) -> bytes:
        """Return the response as it is now, for its client."""
        ...

    def cancel(self) -> bytes:
        """End it; it is kept as it is, and no longer among those that run. Returns how it is."""
        ...

    def drop(self) -> None:
        """End it, and keep nothing."""
        ...


@dataclass(slots=True)
class ResponseStore:
    """See the module's docstring."""

    most: int = 1 << 26  # bytes, --response-store-bytes; 0: nothing is kept
    used: int = 0  # bytes, also of those that run
    running: dict[str, RunningResponse] = field(default_factory=dict)  # by their ids
    reserved: int = 0  # bytes of those that run
    responses: int = 0  # that are kept
    _kept: OrderedDict[str, StoredResponse | StoredConversation] = field(
        default_factory=OrderedDict
    )
    # By caller and id of an item: the ids of all responses that have it, in order, and when each
    # was kept.
    _of_items: dict[tuple[bytes, str], dict[str, int]] = field(default_factory=dict)
    # By caller and id: when each of the responses was kept whose items are not there, in order.
    _unindexed: dict[bytes, dict[str, int]] = field(default_factory=dict)
    _number: int = 0  # of the last response that was kept

    def keep(self, response: StoredResponse) -> None:
        """Keep a response with a new turn.

        Not if it and its conversation are larger than all that may be kept: others stay then.
        """
        id = response.id
        if id in self._kept or response.size + response.turn.measure() > self.most:
            return
        self._kept[id] = response
        self.responses += 1
        self._number += 1
        if len(response.item_ids) > _INDEXED:
            self._unindexed.setdefault(response.caller, {})[id] = self._number
        else:
            for item in response.item_ids.each():
                self._of_items.setdefault((response.caller, item), {})[id] = self._number
        self.used += response.size
        self._hold(response.turn)
        self._make_room()

    def reserve(self, size: int) -> bool:
        """Count bytes of responses that run, which are never forgotten for others.

        Returns whether there is room for them.
        """
        if self.reserved + size > self.most:
            return False
        self.reserved += size
        self.used += size
        self._make_room()
        return True

    def release(self, size: int) -> None:
        """Count bytes less of those that run."""
        self.reserved -= size
        self.used -= size

    def find_running(self, id: str, caller: bytes) -> RunningResponse | None:
        """Return a caller's response that is being computed."""
        found = self.running.get(id)
        return None if found is None or found.caller != caller else found

    def _make_room(self) -> None:
        while self.used > self.most:
            self._drop(next(iter(self._kept)))

    def find(self, id: str, caller: bytes) -> StoredResponse | None:
        """Return a caller's response; it is the last to be forgotten then."""
        found = self._kept.get(id)
        if not isinstance(found, StoredResponse) or found.caller != caller:
            return None
        self._kept.move_to_end(id)
        return found

    def find_by_item(self, id: str, caller: bytes) -> StoredResponse | None:
        """Return the last of a caller's responses that an item was given to, or that have it."""
        indexed = self._of_items.get((caller, id), {})
        last, number = next(reversed(indexed.items()), (None, 0))
        for response, when in reversed(self._unindexed.get(caller, {}).items()):
            if when < number:
                break
            found = self._kept[response]
            if isinstance(found, StoredResponse) and id in found.item_ids:
                last = response
                break
        return None if last is None else self.find(last, caller)

    def forget(self, id: str, caller: bytes) -> bool:
        """Forget a caller's response; returns whether it was there."""
        if self.find(id, caller) is None:
            return False
        self._drop(id)
        return True

    # ---- conversations -------------------------------------------------------------------------

    def keep_conversation(self, conversation: StoredConversation) -> None:
        """Keep a new conversation; it may be forgotten at once, as a response."""
        self._kept[conversation.id] = conversation
        self.used += conversation.size
        self._make_room()

    def find_conversation(self, id: str, caller: bytes) -> StoredConversation | None:
        """Return a caller's conversation; it is the last to be forgotten then."""
        found = self._kept.get(id)
        if not isinstance(found, StoredConversation) or found.caller != caller:
            return None
        self._kept.move_to_end(id)
        return found

    def forget_conversation(self, conversation: StoredConversation) -> None:
        """Forget one; responses that belonged to it are kept."""
        self._drop(conversation.id)

    def describe_conversation(self, conversation: StoredConversation, metadata: bytes) -> None:
        """Replace the metadata, a JSON object. Nothing happens where it was forgotten meanwhile."""
        if self._kept.get(conversation.id) is not conversation:
            return
        self._resize(conversation, len(metadata) - len(conversation.metadata))
        conversation.metadata = metadata

    def add_items(
        self,
        conversation: StoredConversation,
        items: Mapping[str, bytes],
        turn: StoredTurn | None = None,
    ) -> None:
        """Add items, JSON by id; one whose id is there takes its place.

        `turn`: that of a response, if it and those before it are all that is there then. Nothing
        happens where the conversation was forgotten; it alone is, once it is larger than the store.
        """
        if self._kept.get(conversation.id) is not conversation:
            return
        more = measure_items(conversation, items)
        if conversation.size + more > self.most:
            self._drop(conversation.id)
            return
        conversation.items |= items
        conversation.turn = None if turn is None else ref(turn)
        self._resize(conversation, more)

    def remove_item(self, conversation: StoredConversation, id: str) -> None:
        """Remove an item, which must be there."""
        removed = conversation.items.pop(id)
        conversation.turn = None
        self._resize(conversation, -_ITEM - len(removed))

    def _resize(self, conversation: StoredConversation, more: int) -> None:
        conversation.size += more
        self.used += more
        self._make_room()

    # ---- counting ------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise RuntimeError if what is counted is not what is there."""
        responses = [each for each in self._kept.values() if isinstance(each, StoredResponse)]
        turns: dict[int, StoredTurn] = {}
        holders: dict[int, int] = {}
        for response in responses:
            turn: StoredTurn | None = response.turn
            while turn is not None:
                holders[id(turn)] = holders.get(id(turn), 0) + 1
                if id(turn) in turns:
                    break
                turns[id(turn)] = turn
                turn = turn.before
        size = sum(each.size for each in turns.values())
        size += sum(each.size for each in self._kept.values()) + self.reserved
        for each in self._kept.values():
            if isinstance(each, StoredConversation):
                items = sum(_ITEM + len(item) for item in each.items.values())
                size += _RECORD + items + len(each.metadata) - len(b"{}") - each.size
        if len(responses) != self.responses:
            raise RuntimeError(f"{self.responses} responses are counted of {len(responses)}")
        if size != self.used or size > self.most:
            raise RuntimeError(f"{self.used} bytes are counted, {size} are there of {self.most}")
        if any(turn.holders != holders[key] for key, turn in turns.items()):
            raise RuntimeError("a turn is needed more or less often than it is counted")
        unindexed = {(caller, id) for caller, ids in self._unindexed.items() for id in ids}
        large = [each for each in responses if len(each.item_ids) > _INDEXED]
        if unindexed != {(each.caller, each.id) for each in large}:
            raise RuntimeError("responses of many items are not those that are looked through")
        known = {(key, id) for key, ids in self._of_items.items() for id in ids}
        if known != {
            ((each.caller, item), each.id)
            for each in responses
            if len(each.item_ids) <= _INDEXED
            for item in each.item_ids.each()
        }:
            raise RuntimeError("items are not found in the responses that have them")

    def _drop(self, id: str) -> None:
        response = self._kept.pop(id)
        if isinstance(response, StoredConversation):
            self.used -= response.size
            return
        self.responses -= 1
        if len(response.item_ids) > _INDEXED:
            _remove(self._unindexed, response.caller, id)
        else:
            for item in response.item_ids.each():
                _remove(self._of_items, (response.caller, item), id)
        self.used -= response.size
        self._let_go(response.turn)

    def _hold(self, turn: StoredTurn) -> None:
        """Count a new turn, and those before it that were forgotten while it was written."""
        turn.holders = 1
        self.used += turn.size
        while (before := turn.before) is not None:
            before.holders += 1
            if before.holders > 1:
                return
            self.used += before.size
            turn = before

    def _let_go(self, turn: StoredTurn | None) -> None:
        """Count one need less of a turn, and of those before it if none is left."""
        while turn is not None:
            turn.holders -= 1
            if turn.holders:
                return
            self.used -= turn.size
            turn = turn.before


def _remove(table: dict[Key, dict[str, int]], key: Key, id: str) -> None:
    """Remove an id from those of a key, and the key with its last one."""
    ids = table[key]
    del ids[id]
    if not ids:
        del table[key]
