"""What a request was made of is freed object by object, in a thread."""

from __future__ import annotations

import gc
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
import trio

from tgi_trio.router.http.side_threads import SideThreads

pytestmark = pytest.mark.trio


@dataclass
class Thing:
    """Notes where it is freed, and what held it or was held by it."""

    name: str
    freed: list[tuple[str, bool]]
    holds: list[Any] = field(default_factory=list)

    def __del__(self) -> None:
        self.freed.append((self.name, threading.current_thread() is threading.main_thread()))


async def test_what_a_request_was_made_of_is_freed_object_by_object_in_a_thread() -> None:
    threads, freed = SideThreads(), list[tuple[str, bool]]()
    shared = Thing("shared", freed)
    inner = [Thing(f"inner {i}", freed, [{"x": Thing("deep", freed)}]) for i in range(3)]
    made: list[object] = [Thing("root", freed, [*inner, shared]), [shared]]
    del inner
    threads.free(made)
    assert not made
    while threads.running:
        await trio.sleep(0.001)
    # One by one: had each taken along what it holds, those would come before the next.
    names = [name[:5] for name, _ in freed]
    assert names == ["root", *["inner"] * 3, *["deep"] * 3]
    assert not any(here for _, here in freed)
    assert shared.name == "shared", "what others refer to stays"
    threads.free(made)
    assert not threads.running, "there is nothing to be freed"


async def test_what_is_held_twice_or_in_a_circle_is_looked_through_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads, freed = SideThreads(), list[tuple[str, bool]]()
    circle: list[object] = [[Thing("held", freed)] for _ in range(2)]
    circle += [circle, *circle]
    look, looked = gc.get_referents, 0

    def look_and_count(part: object) -> list[object]:
        nonlocal looked
        looked += 1
        if looked > 100:
            raise RuntimeError("it is looked through for ever")
        threads.free([])  # the loop may have something to be freed meanwhile
        return look(part)

    monkeypatch.setattr(gc, "get_referents", look_and_count)
    threads.free([circle])
    while threads.running:
        await trio.sleep(0.001)
    assert looked == 8, "the circle, and twice a list, a thing and its attributes, and `freed`"
    circle.clear()
    assert [name for name, _ in freed] == ["held"] * 2
