"""Places of pixels: pinned ones stay, others make room, and whoever waits for room gets it."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from tgi_trio.errors import Overloaded, ValidationError
from tgi_trio.ipc.images import ArenaPlace
from tgi_trio.router.media.layouts.layout import ImageSize
from tgi_trio.router.media.pixel_options import PixelOptions
from tgi_trio.router.media.pixel_store import PixelStore
from tgi_trio.router.media.places import FreeSpace, align
from tgi_trio.router.media.prompt_image import PromptImage
from tgi_trio.router.media.spool import Compressed, EncodedImage, Spool

UNIT = 64  # bytes: the least that a place takes


class Memory:
    """An arena of a few units."""

    def __init__(self, units: int) -> None:
        self.nbytes = units * UNIT
        self._bytes = bytearray(self.nbytes)

    def view(self, place: ArenaPlace) -> memoryview:
        return memoryview(self._bytes)[place.offset : place.offset + place.nbytes]


@dataclass
class Pixels:
    """What became of an image: each byte of it is its first."""

    letter: bytes
    nbytes: int
    size: ImageSize = field(default_factory=lambda: ImageSize(1, 1))

    async def copy_to(self, memory: memoryview) -> None:
        await trio.sleep(0.1)
        memory[:] = self.letter * len(memory)


class Decoder:
    """Takes a second; the second letter of an image is how many units it has."""

    def __init__(self) -> None:
        self.decoded: Counter[bytes] = Counter()
        self.failures = 0  # of the next images
        self.defects: set[bytes] = set()  # of a library, by image

    @asynccontextmanager
    async def decode(self, data: Compressed, pixel_options: PixelOptions) -> AsyncIterator[Pixels]:
        assert isinstance(data, bytes)
        self.decoded[data] += 1
        await trio.sleep(1.0)
        if data == b"broken":
            raise ValidationError("invalid image: broken")
        if self.failures:
            self.failures -= 1
            raise Overloaded("too many images wait to be decoded")
        if data in self.defects:
            raise OSError("a defect of a library")
        yield Pixels(data[:1], int(data[1:]) * UNIT)


def image(name: str) -> PromptImage:
    data = name.encode()
    return PromptImage(0, 1, ((0, 1),), ImageSize(1, 1), data, data, int(name[1:]) * UNIT)


async def looked_at(store: PixelStore, *names: str) -> None:
    for name in names:
        await store.find_size(name.encode(), name.encode())
        store.check()


@pytest.mark.trio
async def test_what_was_looked_at_is_there_and_stays_while_it_is_pinned(
    autojump_clock: trio.testing.MockClock,
) -> None:
    decoder = Decoder()
    memory = Memory(4)
    store = PixelStore(memory, decoder.decode)
    await looked_at(store, "a2", "b2")
    place = store.pin(image("a2"))
    assert place is not None and bytes(memory.view(place)) == b"a" * 2 * UNIT
    assert store.pin(image("b2")) is not None
    store.unpin(image("b2"))
    await looked_at(store, "c2")  # takes the place of b, which is there no more
    assert store.pin(image("a2")) == place
    assert bytes(memory.view(place)) == b"a" * 2 * UNIT
    assert store.pin(image("b2")) is None
    assert store.pin(image("c2")) is not None
    assert await store.find_size(b"b2", b"b2") is not None
    assert decoder.decoded == {b"a2": 1, b"b2": 1, b"c2": 1}


@pytest.mark.trio
async def test_what_waits_in_line_stays_although_its_request_has_ended(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Nobody else's image may be decoded in its place, and kept under its key."""
    spool, read = Spool(), []

    @asynccontextmanager
    async def decode(data: Compressed, pixel_options: PixelOptions) -> AsyncIterator[Pixels]:
        await trio.sleep(1.0)
        assert isinstance(data, EncodedImage)
        read.append(data.written())
        yield Pixels(b"a", UNIT)

    store = PixelStore(Memory(1), decode)
    written = EncodedImage(spool)
    written.append(b"a1")
    asked = PromptImage(0, 1, ((0, 1),), ImageSize(1, 1), b"a1", written, UNIT)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.run)
        assert store.pin(asked) is None
        written.let_go()
        assert spool.used == 1
        await trio.sleep(10)
        assert store.pin(asked) is not None
        nursery.cancel_scope.cancel()
    assert read == [b"a1"] and not spool.used
    spool.close()


@pytest.mark.trio
async def test_what_is_waited_for_comes_when_there_is_room_and_in_turn(
    autojump_clock: trio.testing.MockClock,
) -> None:
    decoder = Decoder()
    store = PixelStore(Memory(4), decoder.decode)
    ready: list[bytes] = []
    store.on_ready(ready.append)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.run)
        await looked_at(store, "a3", "b4", "c1")
        assert store.pin(image("a3")) is not None
        for name in ("b4", "d1", "b4"):
            assert store.pin(image(name)) is None
        await trio.sleep(10)
        assert ready == []  # d would fit beside a, but b was there before it
        store.unpin(image("a3"))
        await trio.sleep(10)
        store.check()
        assert ready == [b"b4", b"d1"]  # d in the place of b, which nobody has pinned
        assert store.pin(image("d1")) is not None
        nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_what_is_new_takes_no_place_of_what_somebody_is_to_pin(
    autojump_clock: trio.testing.MockClock,
) -> None:
    store = PixelStore(Memory(2), Decoder().decode)
    await looked_at(store, "a2", "b2")
    assert store.pin(image("a2")) is not None
    assert store.pin(image("b2")) is None


@pytest.mark.trio
async def test_all_who_ask_at_once_have_an_image_decoded_once(
    autojump_clock: trio.testing.MockClock,
) -> None:
    decoder = Decoder()
    store = PixelStore(Memory(2), decoder.decode)
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(partial(looked_at, store), "a1")
    assert decoder.decoded == {b"a1": 1}
    with trio.move_on_after(0.5):  # one that leaves: another decodes it
        await store.find_size(b"b1", b"b1")
    store.check()
    with trio.move_on_after(1.05):  # while its pixels are copied
        await store.find_size(b"b1", b"b1")
    store.check()
    await looked_at(store, "b1")
    assert decoder.decoded[b"b1"] == 3
    assert store.pin(image("b1")) is not None


@pytest.mark.trio
async def test_an_image_that_can_never_be_there_is_refused(
    autojump_clock: trio.testing.MockClock,
) -> None:
    store = PixelStore(Memory(2), Decoder().decode)
    for name, words in [
        ("a3", r"192 bytes, and there are 128 .*--image-memory"),
        ("broken", "bro"),
    ]:
        with pytest.raises(ValidationError, match=words):
            await looked_at(store, name)
        assert not store.knows(name.encode())
    store.check()


@pytest.mark.trio
async def test_what_was_used_makes_room_before_what_nobody_has_pinned(
    autojump_clock: trio.testing.MockClock,
) -> None:
    store = PixelStore(Memory(3), Decoder().decode)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.run)
        await looked_at(store, "a1", "b1", "c1")
        assert store.pin(image("b1")) is not None
        store.unpin(image("b1"))  # the most recently used, and the only one that was used
        assert store.pin(image("d1")) is None
        await trio.sleep(10)
        pinned = [name for name in ("a1", "b1", "c1", "d1") if store.pin(image(name)) is not None]
        nursery.cancel_scope.cancel()
    assert pinned == ["a1", "c1", "d1"]
    store.check_room({b"a": 64, b"b": 100})
    with pytest.raises(ValidationError, match=r"192 bytes .* together, and there are 128 .*memory"):
        PixelStore(Memory(2), Decoder().decode).check_room({b"a": 64, b"b": 100})


@pytest.mark.trio
async def test_an_image_that_cannot_be_decoded_again_waits_in_line(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    decoder = Decoder()
    store = PixelStore(Memory(2), decoder.decode)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.run)
        decoder.failures = 2
        asked = trio.Event()

        def again(key: bytes) -> None:
            if store.pin(image("a2")) is not None:
                asked.set()

        store.on_ready(again)
        again(b"a2")
        await asked.wait()
        nursery.cancel_scope.cancel()
    assert decoder.decoded == {b"a2": 3}
    assert "waits in line: too many images" in caplog.text


@pytest.mark.trio
@pytest.mark.parametrize("busy", [False, True], ids=["a defect", "always busy"])
async def test_an_image_that_is_lost_takes_nobody_else_with_it(
    autojump_clock: trio.testing.MockClock, busy: bool
) -> None:
    """Whoever waits for it is told; it is tried again when it is asked for again."""
    decoder = Decoder()
    store = PixelStore(Memory(2), decoder.decode)
    lost: list[tuple[bytes, str]] = []
    ready = trio.Event()

    def again(key: bytes) -> None:
        store.check()
        if store.pin(image(key.decode())) is not None:
            ready.set()

    store.on_ready(again)
    store.on_lost(lambda key, why: lost.append((key, why)))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.run)
        for repeated in (1, 2):
            if busy:
                decoder.failures = 1000
            else:
                decoder.defects.add(b"a2")
            assert store.pin(image("a2")) is None
            await trio.sleep(120)
            decoder.failures = 0
            why = "too many images wait" if busy else "OSError: a defect of a library"
            assert [key for key, _ in lost] == [b"a2"] * repeated
            assert all("cannot be decoded again" in each and why in each for _, each in lost)
        store.check()
        again(b"b2")
        await ready.wait()
        nursery.cancel_scope.cancel()
    assert decoder.decoded[b"b2"] == 1
    assert decoder.decoded[b"a2"] == (40 if busy else 2)


@given(
    units=st.integers(1, 6),
    workers=st.integers(1, 2),
    sequences=st.lists(
        st.tuples(st.sampled_from("abcdef"), st.integers(0, 3), st.integers(0, 4)), max_size=12
    ),
)
@settings(max_examples=40, deadline=None)
def test_whoever_pins_gets_a_place_with_its_own_pixels(
    units: int, workers: int, sequences: list[tuple[str, int, int]]
) -> None:
    """Sequences look at an image, wait until it can be pinned, hold it for a while, and leave."""

    async def main() -> None:
        memory = Memory(units)
        store = PixelStore(memory, Decoder().decode, workers)
        ready: dict[bytes, trio.Event] = {}

        def tell(key: bytes) -> None:
            store.check()
            ready.pop(key, trio.Event()).set()

        store.on_ready(tell)

        async def live(letter: str, delay: int, held: int) -> None:
            name = f"{letter}{1 + 'abcdef'.index(letter) % units}"
            one = image(name)
            await trio.sleep(delay)
            await looked_at(store, name)
            while (place := store.pin(one)) is None:
                await ready.setdefault(one.key, trio.Event()).wait()
            await trio.sleep(held)
            assert bytes(memory.view(place)) == letter.encode() * one.nbytes
            store.check()
            store.unpin(one)
            store.check()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.run)
            async with trio.open_nursery() as living:
                for each in sequences:
                    living.start_soon(live, *each)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 300)), max_size=40))
def test_free_space_is_what_is_not_taken(steps: list[tuple[bool, int]]) -> None:
    space = FreeSpace(1024)
    taken: list[tuple[int, int]] = []
    for take, number in steps:
        if take and (offset := space.take(number)) is not None:
            taken.append((offset, number))
        elif not take and taken:
            space.give_back(*taken.pop(number % len(taken)))
        places = sorted([*((at, align(size)) for at, size in taken), *space.holes])
        ends = [at + size for at, size in places]
        assert [at for at, _ in places] == [0, *ends[:-1]] and ends[-1] == 1024
        assert space.nbytes == 1024 - sum(align(size) for _, size in taken)
        assert all(sum(a) < b[0] for a, b in zip(space.holes, space.holes[1:], strict=False))
