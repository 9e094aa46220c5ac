"""Keeps responses in memory, so that later requests can go on from them.

A response is found by its id, and each item of its conversation by the item's. What is used least
recently is forgotten first, once all of it together is larger than --response-store-bytes.

Responses that are still computed, in the background, are counted as well, and found by their ids.

A conversation is a chain of turns: `resp_2`, which went on from `resp_1`, holds what it added and
the turn before. A response can be forgotten while later ones still need its turn.

    resp_1 ──▶ turn 1 ◀── turn 2 ◀── resp_2
                  ▲
                  └────── turn 3 ◀── resp_3
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Protocol

from tgi_trio.router.http.event_log import EventLog

_RECORD = 1024  # bytes that are counted for a response beside its texts: objects, keys of indexes
_ITEM = 384  # the same for each of its items


@dataclass(slots=True, eq=False)
class Turn:
    """What one request added to a conversation, as JSON lists of items."""

    before: Turn | None
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
class StoredResponse:
    """A response that is kept."""

    id: str
    caller: bytes  # whose it is: `api_keys.name_caller`
    body: bytes  # as the client got it
    turn: Turn
    item_ids: tuple[str, ...] = ()  # of what was given and answered
    background: bool = False
    log: EventLog | None = None  # its events, all of them, if they may be read again

    @property
    def size(self) -> int:
        """Bytes, without those of its turn."""
        read_again = 0 if self.log is None else self.log.size
        items = sum(_ITEM + len(each) for each in self.item_ids)
        return len(self.body) + _RECORD + items + read_again


class RunningResponse(Protocol):
    """A response that is being computed in the background."""

    id: str
    caller: bytes
    turn: Turn  # without its answer
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
    _responses: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    # By caller and id of an item: the ids of all responses that have it, in order.
    _of_items: dict[tuple[bytes, str], dict[str, None]] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return how many responses are kept."""
        return len(self._responses)

    def keep(self, response: StoredResponse) -> None:
        """Keep a response with a new turn.

        Not if it and its conversation are larger than all that may be kept: others stay then.
        """
        id = response.id
        if id in self._responses or response.size + response.turn.measure() > self.most:
            return
        self._responses[id] = response
        for item in response.item_ids:
            self._of_items.setdefault((response.caller, item), {})[id] = None
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
            self._drop(next(iter(self._responses)))

    def find(self, id: str, caller: bytes) -> StoredResponse | None:
        """Return a caller's response; it is the last to be forgotten then."""
        found = self._responses.get(id)
        if found is None or found.caller != caller:
            return None
        self._responses.move_to_end(id)
        return found

    def find_by_item(self, id: str, caller: bytes) -> StoredResponse | None:
        """Return the last of a caller's responses that an item was given to, or that have it."""
        found = self._of_items.get((caller, id))
        return self.find(next(reversed(found)), caller) if found else None

    def forget(self, id: str, caller: bytes) -> bool:
        """Forget a caller's response; returns whether it was there."""
        if self.find(id, caller) is None:
            return False
        self._drop(id)
        return True

    def check(self) -> None:
        """Raise RuntimeError if what is counted is not what is there."""
        turns: dict[int, Turn] = {}
        holders: dict[int, int] = {}
        for response in self._responses.values():
            turn: Turn | None = response.turn
            while turn is not None:
                holders[id(turn)] = holders.get(id(turn), 0) + 1
                if id(turn) in turns:
                    break
                turns[id(turn)] = turn
                turn = turn.before
        size = sum(each.size for each in turns.values())
        size += sum(each.size for each in self._responses.values()) + self.reserved
        if size != self.used or size > self.most:
            raise RuntimeError(f"{self.used} bytes are counted, {size} are there of {self.most}")
        if any(turn.holders != holders[key] for key, turn in turns.items()):
            raise RuntimeError("a turn is needed more or less often than it is counted")
        known = {(key, id) for key, ids in self._of_items.items() for id in ids}
        if known != {
            ((each.caller, item), each.id)
            for each in self._responses.values()
            for item in each.item_ids
        }:
            raise RuntimeError("items are not found in the responses that have them")

    def _drop(self, id: str) -> None:
        response = self._responses.pop(id)
        for item in set(response.item_ids):
            owners = self._of_items[response.caller, item]
            del owners[id]
            if not owners:
                del self._of_items[response.caller, item]
        self.used -= response.size
        self._let_go(response.turn)

    def _hold(self, turn: Turn) -> None:
        """Count a new turn, and those before it that were forgotten while it was written."""
        turn.holders = 1
        self.used += turn.size
        while (before := turn.before) is not None:
            before.holders += 1
            if before.holders > 1:
                return
            self.used += before.size
            turn = before

    def _let_go(self, turn: Turn | None) -> None:
        """Count one need less of a turn, and of those before it if none is left."""
        while turn is not None:
            turn.holders -= 1
            if turn.holders:
                return
            self.used -= turn.size
            turn = turn.before
