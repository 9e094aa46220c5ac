"""Prefixes that are kept while a server is idle: part by part, and only while nobody comes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from tests.router.shards.test_prefix_store import INFO, KEPT, opened, settings
from tgi_trio.ipc.prefixes import KeepOrder, PrefixReport
from tgi_trio.router.scheduling.kept_prefixes import Budget, Collected
from tgi_trio.router.shards import prefix_saving
from tgi_trio.router.shards.prefix_saving import PrefixSaver
from tgi_trio.router.shards.prefix_store import PrefixStore
from tgi_trio.settings.records import Settings

__all__ = ["settings"]  # a fixture

EVERY = 100.0  # virtual seconds


class Scheduler:
    """Has five cached blocks, and as many requests as a test says."""

    def __init__(self) -> None:
        self.counters = Counter(added=3)
        self.held_blocks = self.queue_size = 0
        self.blocks = [9, 8, 7, 6, 5]
        self.pieces, self.changed = 3, False

    def collect_prefixes(self, budget: Budget) -> Iterator[Collected | None]:
        for _ in range(self.pieces):
            yield None
            if self.changed:
                return
        yield Collected(KEPT, self.blocks, [])


class Link:
    """A shard that writes what it is told, after a while."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, ...]] = []
        self.error = ""
        self.takes = 0.01

    async def keep_prefixes(self, order: KeepOrder) -> PrefixReport:
        await trio.sleep(self.takes)
        self.parts.append(order.blocks)
        (order.folder / f"{order.key.hex()}-0.prefixes").write_bytes(b"numbers")
        return PrefixReport(7, self.error)


async def at_once(call: Callable[..., None], *args: Any) -> None:
    call(*args)


class Idle:
    """A saver, and what is around it."""

    def __init__(self, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(prefix_saving, "_PART", 2 * INFO.kv_bytes_per_token * INFO.block_size)
        monkeypatch.setattr(PrefixStore, "seconds", EVERY)
        monkeypatch.setattr(trio.to_thread, "run_sync", at_once)  # the clock waits for no thread
        self.store = opened(settings)
        self.scheduler, self.link = Scheduler(), Link()
        self.saver = PrefixSaver(self.store, INFO, SimpleNamespace(kv_bytes=0, blocks=9))  # type: ignore[arg-type]

    async def run(self) -> None:
        await self.saver.run(self.scheduler, self.link)  # type: ignore[arg-type]

    @property
    def files(self) -> list[str]:
        names = (path.name for path in self.store.folder.iterdir())
        return sorted(name.partition("-")[2] or name for name in names)


WHOLE = [(9, 8), (7, 6), (5,)]
SAVED = ["0.prefixes", "index.prefixes", "lock"]


@pytest.fixture
def idle(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Idle:
    return Idle(settings, monkeypatch)


@pytest.mark.trio
async def test_prefixes_are_kept_once_for_each_time_that_somebody_was_there(
    idle: Idle, autojump_clock: trio.testing.MockClock
) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(idle.run)
        await trio.sleep(EVERY - 1)
        assert not idle.link.parts
        await trio.sleep(5)
        assert idle.link.parts == WHOLE
        await trio.sleep(10 * EVERY)
        assert idle.link.parts == WHOLE and idle.files == SAVED
        idle.scheduler.counters["added"] += 1
        await trio.sleep(EVERY + 5)
        assert idle.link.parts == WHOLE * 2 and idle.files == SAVED
        nursery.cancel_scope.cancel()


@pytest.mark.trio
@pytest.mark.parametrize("busy", ["held_blocks", "queue_size"])
async def test_nothing_is_written_while_somebody_is_there(
    idle: Idle, busy: str, autojump_clock: trio.testing.MockClock
) -> None:
    setattr(idle.scheduler, busy, 1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(idle.run)
        await trio.sleep(3 * EVERY)
        assert not idle.link.parts
        setattr(idle.scheduler, busy, 0)
        await trio.sleep(5)
        assert idle.link.parts == WHOLE
        nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_who_comes_waits_for_one_part_at_most(
    idle: Idle, autojump_clock: trio.testing.MockClock
) -> None:
    idle.link.takes = 5
    async with trio.open_nursery() as nursery:
        nursery.start_soon(idle.run)
        await trio.sleep(EVERY + 4)  # the first part is being written
        idle.scheduler.counters["added"] += 1
        await trio.sleep(20)
        assert idle.link.parts == WHOLE[:1]
        assert idle.files == ["lock"], "what was begun is gone"
        await trio.sleep(2 * EVERY)
        assert idle.link.parts == WHOLE[:1] + WHOLE
        nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_what_a_rank_cannot_write_leaves_what_there_was(
    idle: Idle, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(idle.run)
        await trio.sleep(EVERY + 5)
        before = [path.name for path in idle.store.folder.iterdir()]
        idle.link.error = "[Errno 28] No space left on device"
        idle.scheduler.counters["added"] += 1
        await trio.sleep(EVERY + 5)
        assert len(idle.link.parts) == 4
        assert f"not kept in {idle.store.folder}: [Errno 28] No space" in caplog.text
        assert sorted(path.name for path in idle.store.folder.iterdir()) == sorted(before)
        nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_an_end_waits_for_the_part_that_is_being_written(
    idle: Idle, autojump_clock: trio.testing.MockClock
) -> None:
    idle.link.takes = 5
    async with trio.open_nursery() as nursery:
        nursery.start_soon(idle.run)
        await trio.sleep(EVERY + 4)
        await idle.saver.stop()
        assert idle.link.parts == WHOLE[:1]
        await trio.sleep(3 * EVERY)
        assert idle.link.parts == WHOLE[:1], "nothing is written behind it"


@pytest.mark.trio
async def test_an_empty_cache_replaces_nothing(
    idle: Idle, autojump_clock: trio.testing.MockClock
) -> None:
    idle.scheduler.blocks = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(idle.run)
        await trio.sleep(EVERY + 5)
        assert idle.files == ["lock"]
        nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_others_run_while_there_is_much_to_list(idle: Idle) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    idle.scheduler.pieces = 50
    async with trio.open_nursery() as nursery:
        nursery.start_soon(count)
        await idle.saver._save(idle.scheduler, idle.link)  # type: ignore[arg-type]
        nursery.cancel_scope.cancel()
    assert turns >= 50 and idle.link.parts == WHOLE


@pytest.mark.trio
async def test_what_has_changed_while_it_was_listed_is_kept_another_time(
    idle: Idle, autojump_clock: trio.testing.MockClock
) -> None:
    idle.scheduler.changed = True
    async with trio.open_nursery() as nursery:
        nursery.start_soon(idle.run)
        await trio.sleep(EVERY + 5)
        assert not idle.link.parts and idle.files == ["lock"]
        idle.scheduler.changed = False
        await trio.sleep(EVERY + 5)
        assert idle.link.parts == WHOLE, "although nobody was there since"
        nursery.cancel_scope.cancel()
