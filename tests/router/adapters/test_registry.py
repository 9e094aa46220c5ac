"""Names, numbers and turns of adapters, in virtual time, against a shard that only answers."""

from __future__ import annotations

import itertools
import random
from collections import deque
from pathlib import Path

import pytest
import trio
import trio.testing

from tgi_trio.errors import ConfigurationError, Overloaded, Unavailable, ValidationError
from tgi_trio.ipc.adapters import AdapterReport, decode_adapter
from tgi_trio.ipc.frame_codec import Frame
from tgi_trio.ipc.frames import FrameKind
from tgi_trio.router.adapters.adapter_states import AdapterState
from tgi_trio.router.adapters.registry import LONGEST_WAIT, PATIENCE, AdapterRegistry
from tgi_trio.router.adapters.served_adapter import ServedAdapter

LOAD_S = 0.2


class FakeShard:
    """Loads what it is ordered, one after the other; keeps what it has."""

    def __init__(self, registry: AdapterRegistry, most: int) -> None:
        self.registry = registry
        self.most = most
        self.has: set[int] = set()
        self.broken: set[str] = set()  # folders that cannot be loaded
        self.lost: set[int] = set()  # that could not be, once
        self.orders: deque[tuple[int, str]] = deque()

    def boot(self) -> None:
        """Another incarnation: it knows nothing, and is told before it is attached."""
        self.registry.detach()
        self.has.clear()
        self.orders.clear()
        for order in self.registry.orders():
            self.registry.settle(self._load(order.number, order.folder.name))
        self.registry.attach(self._send)

    def _send(self, frame: bytes) -> None:
        told = Frame(memoryview(frame))
        if told.kind is FrameKind.DROP_ADAPTER:
            self.has.discard(told.word("adapter"))
            self.orders = deque(each for each in self.orders if each[0] != told.word("adapter"))
        else:
            order = decode_adapter(told)
            self.orders.append((order.number, order.folder.name))

    def _load(self, number: int, folder: str) -> AdapterReport:
        if folder in self.broken:
            self.lost.add(number)
            return AdapterReport(number, "it is broken")
        self.has.add(number)
        assert len(self.has) <= self.most
        return AdapterReport(number, "", 10, 4, bytes(32))

    async def run(self) -> None:
        while True:
            await trio.sleep(LOAD_S)
            if self.orders:
                self.registry.settle(self._load(*self.orders.popleft()))
            self.registry.check()


def served(count: int, most: int) -> tuple[AdapterRegistry, FakeShard]:
    registry = AdapterRegistry({f"a{i}": f"/adapters/a{i}" for i in range(count)}, most)
    shard = FakeShard(registry, most)
    shard.boot()
    registry.check()
    return registry, shard


async def waits(shard: FakeShard, adapter: ServedAdapter) -> float:
    """Acquire with a shard at work; return the seconds it took."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(shard.run)
        began, refused = trio.current_time(), None
        try:
            await shard.registry.acquire(adapter)
        except (ValidationError, Unavailable) as error:
            refused = error
        nursery.cancel_scope.cancel()
    shard.registry.check()
    if refused is not None:
        raise refused
    return trio.current_time() - began


@pytest.mark.trio
async def test_the_least_recently_used_gives_way(
    autojump_clock: object,
) -> None:
    registry, shard = served(4, 2)
    first, second, third, fourth = (registry.find(f"a{i}") for i in range(4))
    assert shard.has == {1, 2} and list(registry.loaded) == [first, second]
    assert await waits(shard, first) == await waits(shard, second) == 0.0  # they are there
    registry.release(first)
    registry.release(second)
    assert await waits(shard, first) == 0.0  # now the second is the least recently used
    assert await waits(shard, third) == pytest.approx(LOAD_S)
    assert shard.has == {1, 3}
    registry.release(first)
    assert await waits(shard, fourth) == pytest.approx(LOAD_S)
    assert shard.has == {3, 4}  # the third is in use
    registry.release(third)
    registry.release(fourth)
    registry.check()


@pytest.mark.trio
async def test_who_waits_longer_is_served_sooner_and_a_deadline_ends_a_wait(
    autojump_clock: object,
) -> None:
    registry, shard = served(4, 1)
    await waits(shard, registry.find("a0"))
    came: list[str] = []

    async def use(name: str, after: float, patience: float) -> None:
        await trio.sleep(after)
        with trio.move_on_after(patience):
            await registry.acquire(registry.find(name))
            came.append(name)
            await trio.sleep(3)
            registry.release(registry.find(name))

    async with trio.open_nursery() as work, trio.open_nursery() as nursery:
        work.start_soon(shard.run)
        nursery.start_soon(use, "a2", 0.1, 100)
        nursery.start_soon(use, "a3", 0.2, 100)
        nursery.start_soon(use, "a1", 0.05, 0.5)  # gives up before there is room
        await trio.sleep(2)
        registry.check()
        registry.release(registry.find("a0"))
        while len(came) < 2:
            await trio.sleep(1)
        work.cancel_scope.cancel()
    assert came == ["a2", "a3"]
    assert not registry.find("a1").waiting


@pytest.mark.trio
async def test_one_that_is_always_in_use_keeps_no_other_out(autojump_clock: object) -> None:
    """Requests for it that overlap without end: the other has its turn, and then it again."""
    registry, shard = served(2, 1)
    hot, other = registry.find("a0"), registry.find("a1")
    served_hot = 0

    async def ask_for_hot() -> None:
        nonlocal served_hot
        for _ in range(20):
            await registry.acquire(hot)
            served_hot += 1
            await trio.sleep(0.5)
            registry.release(hot)

    async with trio.open_nursery() as work:
        work.start_soon(shard.run)
        async with trio.open_nursery() as clients:
            for i in range(4):
                clients.start_soon(ask_for_hot)
                await trio.sleep(0.1)
                if i == 3:
                    began = trio.current_time()
                    await registry.acquire(other)
                    waited = trio.current_time() - began
                    registry.release(other)
        work.cancel_scope.cancel()
    assert PATIENCE <= waited <= PATIENCE + 0.5 + 2 * LOAD_S
    assert served_hot == 80
    registry.check()


@pytest.mark.trio
async def test_no_wait_is_without_an_end(autojump_clock: object) -> None:
    """Where a request never ends, where the shard never answers, where nothing is served."""
    registry, _ = served(2, 1)
    await registry.acquire(registry.find("a0"))
    began = trio.current_time()
    with pytest.raises(Overloaded, match=r"--max-loaded-adapters 1 are in use, or its files"):
        await registry.acquire(registry.find("a1"))
    assert trio.current_time() - began == pytest.approx(LONGEST_WAIT)
    registry.release(registry.find("a0"))
    with pytest.raises(Overloaded):
        await registry.acquire(registry.find("a1"))  # ordered, and nobody loads it
    registry.check()

    async def wait() -> None:
        with pytest.raises(Unavailable, match="it is over"):
            await registry.acquire(registry.find("a1"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        registry.close("it is over")
    await wait()
    registry.check()


@pytest.mark.trio
async def test_one_that_cannot_be_loaded_is_told_of_and_tried_again(
    autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder that has gone was a mistake of the client's, who was told its path."""
    registry, shard = served(2, 1)
    shard.broken.add("a1")
    second = registry.find("a1")
    for count in (1, 2):
        with pytest.raises(Unavailable, match=r"`a1` cannot be loaded now.* log names$"):
            await waits(shard, second)
        assert caplog.messages == ["the adapter `a1` cannot be loaded: it is broken"] * count
    shard.broken.clear()
    await waits(shard, second)
    assert shard.has == {2}
    registry.release(second)


def test_one_that_cannot_be_loaded_with_the_model() -> None:
    registry = AdapterRegistry({"a": "/adapters/a"}, 1)
    shard = FakeShard(registry, 1)
    shard.broken.add("a")
    shard.boot()
    with pytest.raises(ConfigurationError, match="--lora-adapters: `a` cannot be served: it is b"):
        registry.refuse_failed()


@pytest.mark.trio
async def test_the_models_own_stays_beside_those_with_names(autojump_clock: object) -> None:
    """It has no name, takes no room of theirs, and makes none, however long somebody waits."""
    named = {"a": "/adapters/a", "b": "/adapters/b"}
    registry = AdapterRegistry(named, 1, own={"image": "/own/eye", "audio": "/own/ear"})
    shard = FakeShard(registry, 3)
    shard.boot()
    registry.check()
    assert registry.to_come == 0 and registry.names == ("a", "b") and len(registry.loaded) == 3
    assert registry.find_own(()) is None and registry.find_own({"video"}) is None
    ear, eye = registry.find_own({"audio"}), registry.find_own({"audio", "image"})
    assert (
        ear is not None and eye is not None and (ear.folder.name, eye.folder.name) == ("ear", "eye")
    )
    with pytest.raises(ValidationError, match=r"`audio` is not served\. Adapters served: `a`, `b`"):
        registry.find("audio")
    assert await waits(shard, ear) == await waits(shard, registry.find("a")) == 0.0
    with pytest.raises(Overloaded, match="--max-loaded-adapters 1 are in use"):
        await registry.acquire(registry.find("b"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(registry.acquire, registry.find("b"))
        await trio.sleep(1.5 * PATIENCE)
        assert (ear.state, registry.find("a").state) == (
            AdapterState.RESIDENT,
            AdapterState.LEAVING,
        )
        nursery.cancel_scope.cancel()
    assert shard.has == {1, 2, 3}
    registry.release(registry.find("a"))
    assert await waits(shard, registry.find("b")) == pytest.approx(LOAD_S)
    assert shard.has == {1, 2, 4}
    registry.release(ear)
    shard.boot()
    assert shard.has == {1, 2, 4}, "another incarnation has it as well"
    shard.broken.add("ear")
    shard.boot()
    with pytest.raises(ConfigurationError, match="the model's own adapter in /own/ear cannot be"):
        registry.refuse_failed()


@pytest.mark.trio
async def test_names_come_and_go(autojump_clock: object) -> None:
    """A number is never given twice; who has an adapter ends with it."""
    registry, shard = served(1, 3)
    gone: list[int] = []
    registry.on_forgotten(gone.append)
    old = registry.find("a0")
    await waits(shard, old)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(shard.run)
        await registry.load("a0", Path("/adapters/other"))
        new = registry.find("a0")
        assert (old.number, new.number) == (1, 2) and shard.has == {1, 2}
        registry.check()
        with pytest.raises(ValidationError, match="`a0` has been loaded by another"):
            await registry.load("a0", Path("/adapters/third"), replace=False)
        shard.broken.add("fourth")
        with pytest.raises(ValidationError, match="it is broken"):
            await registry.load("a0", Path("/adapters/fourth"))
        nursery.cancel_scope.cancel()
    assert registry.find("a0") is new and gone == [3, 4]
    registry.release(old)
    assert gone == [3, 4, 1] and shard.has == {2}
    registry.unload("a0")
    assert gone == [3, 4, 1, 2] and not shard.has and not registry.names
    with pytest.raises(ValidationError, match=r"`a0` is not served\. Adapters served: none"):
        registry.unload("a0")
    registry.check()


@pytest.mark.trio
async def test_what_has_changed_while_no_shard_was_there(
    autojump_clock: object,
) -> None:
    """Unloaded between two incarnations: the next one is told to drop it, and has room."""
    registry, shard = served(3, 2)
    second, third = registry.find("a1"), registry.find("a2")
    await waits(shard, second)
    registry.detach()
    orders = registry.orders()
    assert [order.number for order in orders] == [1, 2] and orders[1].sha256 == bytes(32)
    registry.settle(AdapterReport(2, "the files are not those"))  # in use, by a replayed request
    registry.unload("a0")
    registry.settle(AdapterReport(1, "", 10, 4, bytes(32)))  # nobody wants it any more
    sent: list[FrameKind] = []
    registry.attach(lambda frame: sent.append(Frame(memoryview(frame)).kind))
    assert sent == [FrameKind.DROP_ADAPTER]  # not of what failed: it is to say why
    registry.check()
    registry.detach()
    shard.boot()
    await waits(shard, third)
    registry.release(third)
    registry.release(second)
    registry.check()


@pytest.mark.trio
async def test_who_gives_up_leaves_the_queue_though_others_still_have_the_adapter(
    autojump_clock: object,
) -> None:
    """Its old requests have it from before a crash, after which it could not be loaded again."""
    registry, shard = served(2, 1)
    lost, other = registry.find("a0"), registry.find("a1")
    await waits(shard, lost)
    shard.broken = {"a0"}
    shard.boot()
    await waits(shard, other)
    with trio.move_on_after(PATIENCE / 2) as patience:
        await registry.acquire(lost)
    assert patience.cancelled_caught
    registry.check()
    registry.release(lost)
    registry.release(other)
    registry.check()


@pytest.mark.trio
@pytest.mark.parametrize("seed", range(3))
async def test_any_use(seed: int, autojump_clock: object) -> None:
    """Crowds, crashes, names that come and go: every rule holds, nobody waits for ever."""
    draw = random.Random(seed)
    most = draw.randint(1, 3)
    registry, shard = served(6, most)
    names = itertools.count(6)

    async def client() -> None:
        for _ in range(30):
            await trio.sleep(draw.random())
            try:
                adapter = registry.find(f"a{draw.choice((0, 0, 0, *range(8)))}")
                with trio.move_on_after(draw.choice((0.1, 1, 1000))):
                    await registry.acquire(adapter)
                    try:
                        await trio.sleep(draw.random() * 2)
                        assert adapter.number in shard.has | shard.lost
                    finally:
                        registry.release(adapter)
            except (ValidationError, Unavailable):
                continue

    async def operator() -> None:
        while True:
            await trio.sleep(draw.random() * 5)
            choice = draw.random()
            shard.broken = {"a3"} if draw.random() < 0.2 else set()
            try:
                if choice < 0.3:
                    shard.boot()
                elif choice < 0.6 and registry.names:
                    registry.unload(draw.choice(registry.names))
                else:
                    name = f"a{next(names) % 8}"
                    with trio.move_on_after(3):
                        await registry.load(name, Path(f"/adapters/{name}"))
            except ValidationError:
                continue
            registry.check()

    async with trio.open_nursery() as work:
        work.start_soon(shard.run)
        work.start_soon(operator)
        async with trio.open_nursery() as clients:
            for _ in range(8):
                clients.start_soon(client)
        work.cancel_scope.cancel()
    registry.check()
    assert all(not each.users and not each.waiting for each in registry._by_number.values())
