"""The ring: any interleaving of writes and reads, and peers that write nonsense into it."""

from __future__ import annotations

import mmap
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tgi_trio.errors import CorruptRing
from tgi_trio.ipc import ring
from tgi_trio.ipc.ring import LAST, PART, SKIP, WORD, RingMemory, RingReader, RingWriter, pad_size

CAPACITY = 4096


def fresh_ring(start: int = 0) -> RingMemory:
    """Return a ring whose counters stand at `start` bytes."""
    view = memoryview(mmap.mmap(-1, 4096 + CAPACITY))
    head, tail = view[0:8].cast("Q"), view[128:136].cast("Q")
    head[0] = tail[0] = start
    return RingMemory(head, tail, view[4096:])


def both(memory: RingMemory) -> tuple[RingWriter, RingReader]:
    return RingWriter(memory, None, lambda: "reader"), RingReader(memory, None, lambda: "writer")


MAX_PAYLOAD = CAPACITY // 2 - WORD


def is_long(payload: bytes) -> bool:
    return len(payload) > MAX_PAYLOAD


class RingMachine(RuleBasedStateMachine):
    """The ring against a deque; every interleaving that one thread per side can produce."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = fresh_ring()
        self.writer, self.reader = both(self.memory)
        self.model: deque[bytes] = deque()
        self.count = 0
        self.reserved: bytes | None = None
        self.unfinished: bytes | None = None  # of which parts may have been written

    def payload(self, size: int) -> bytes:
        self.count += 1
        return bytes((self.count + i) & 255 for i in range(size))

    @precondition(lambda self: self.unfinished is None)
    @rule(size=st.one_of(st.integers(0, 64), st.integers(0, MAX_PAYLOAD)))
    def write(self, size: int) -> None:
        payload = self.payload(size)
        self.reserved = None  # a reservation that was never committed is forgotten
        if self.writer.try_write(payload):
            self.model.append(payload)
        else:
            assert self.model, "an empty ring refused a frame that fits"

    @precondition(lambda self: self.unfinished is None)
    @rule(size=st.integers(0, MAX_PAYLOAD))
    def reserve(self, size: int) -> None:
        view = self.writer.reserve(size)
        self.reserved = None
        if view is not None:
            self.reserved = self.payload(size)
            assert len(view) == size
            view[:] = self.reserved

    @precondition(lambda self: self.reserved is not None)
    @rule()
    def commit(self) -> None:
        self.writer.commit()
        assert self.reserved is not None
        self.model.append(self.reserved)
        self.reserved = None

    @precondition(lambda self: self.unfinished is None)
    @rule(size=st.integers(MAX_PAYLOAD + 1, 8 * CAPACITY))
    def write_in_parts(self, size: int) -> None:
        self.unfinished = self.payload(size)
        self.reserved = None
        self.go_on()

    @precondition(lambda self: self.unfinished is not None)
    @rule()
    def go_on(self) -> None:
        assert self.unfinished is not None
        if self.writer.try_write(self.unfinished):
            self.model.append(self.unfinished)
            self.unfinished = None

    @precondition(lambda self: self.unfinished is not None)
    @rule()
    def finish(self) -> None:
        """A reader that goes on reading always makes room for the next part."""
        for _ in range(40):
            if self.unfinished is None:
                return
            self.drain()
            assert self.reader.try_read() is None
            self.go_on()
        raise AssertionError("a frame in parts was never written")

    @rule(size=st.integers(MAX_PAYLOAD + 1, 2 * CAPACITY))
    def reserve_what_can_never_fit(self, size: int) -> None:
        with pytest.raises(ValueError, match=f"0 to {MAX_PAYLOAD}"):
            self.writer.reserve(size)

    @rule()
    def look(self) -> None:
        view = self.reader.try_read()
        assert (view is None) == (not self.model)
        if view is not None:
            assert view == self.model[0]

    @rule()
    def read(self) -> None:
        view = self.reader.try_read()
        if view is None:
            assert not self.model
            return
        assert bytes(view) == self.model.popleft()
        self.reader.release()

    @rule()
    def drain(self) -> None:
        while self.model:
            self.read()

    @precondition(lambda self: self.unfinished is None and not any(map(is_long, self.model)))
    @rule()
    def attach_again(self) -> None:
        """Both counters live in shared memory: fresh objects see the same ring."""
        self.writer, self.reader = both(self.memory)
        self.reserved = None

    @invariant()
    def holds(self) -> None:
        self.writer.check()
        self.reader.check()
        if self.unfinished is None:
            assert self.reader.empty() == (not self.model)
        held = sum(pad_size(len(p)) for p in self.model if not is_long(p))
        assert self.writer.free <= CAPACITY - held


TestRing = RingMachine.TestCase
TestRing.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


@given(st.lists(st.integers(0, MAX_PAYLOAD), max_size=60), st.integers(0, 2**20))
def test_every_position_of_the_head_takes_every_size(sizes: list[int], start: int) -> None:
    writer, reader = both(fresh_ring(start * WORD))
    for number, size in enumerate(sizes):
        payload = bytes([number & 255]) * size
        assert writer.try_write(payload)
        assert reader.try_read() == payload
        reader.release()
    assert writer.free == CAPACITY


def test_a_full_ring_refuses_and_takes_again_after_a_read() -> None:
    writer, reader = both(fresh_ring())
    frame = bytes(MAX_PAYLOAD)
    assert writer.try_write(frame)
    assert writer.try_write(frame)
    assert writer.free == 0
    assert not writer.try_write(b"")
    reader.try_read()
    reader.release()
    assert writer.try_write(frame)


def test_frames_are_aligned_for_numpy() -> None:
    writer, reader = both(fresh_ring())
    for size in (1, 7, 8, 9, 0, 3):
        assert writer.try_write(b"x" * size)
    offsets = []
    while (view := reader.try_read()) is not None:
        offsets.append(len(view))
        if len(view) >= 8:
            view[:8].cast("Q")
        reader.release()
    assert offsets == [1, 7, 8, 9, 0, 3]


def test_what_was_not_committed_does_not_exist() -> None:
    memory = fresh_ring()
    writer, reader = both(memory)
    view = writer.reserve(100)
    assert view is not None
    view[:] = b"x" * 100
    assert reader.empty()
    assert reader.try_read() is None


def test_a_reader_gets_a_read_only_view() -> None:
    writer, reader = both(fresh_ring())
    writer.try_write(b"abc")
    view = reader.try_read()
    assert view is not None
    with pytest.raises(TypeError):
        view[0] = 1


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(8 + CAPACITY + 8, id="more than the ring holds"),
        pytest.param(0, id="behind the tail"),
        pytest.param(8 + 13, id="not aligned"),
        pytest.param(2**64 - 8, id="huge"),
    ],
)
def test_an_impossible_head_is_an_error_that_names_the_writer(head: int) -> None:
    memory = fresh_ring(8)
    reader = RingReader(memory, None, lambda: "rank 3")
    memory.head[0] = head
    with pytest.raises(CorruptRing, match=rf"rank 3: .*head (is|at) {head}"):
        reader.try_read()
    with pytest.raises(CorruptRing):
        reader.check()


@pytest.mark.parametrize("length", [9, 17, CAPACITY, 2**32, 2**63, 2**64 - 9, 2**64 - 2], ids=hex)
def test_a_length_beyond_the_head_is_an_error(length: int) -> None:
    memory = fresh_ring()
    writer, reader = both(memory)
    writer.try_write(b"12345678")
    memory.data.cast("Q")[0] = length
    with pytest.raises(CorruptRing, match=f"a frame of {length} bytes"):
        reader.try_read()


@pytest.mark.parametrize("start", [0, CAPACITY - 8, CAPACITY // 2])
@pytest.mark.parametrize("published", [8, 16, CAPACITY // 2, CAPACITY])
def test_a_skip_without_a_frame_is_an_error(start: int, published: int) -> None:
    memory = fresh_ring(start)
    reader = RingReader(memory, None, lambda: "writer")
    words = memory.data.cast("Q")
    words[start >> 3 if start < CAPACITY else 0] = SKIP
    if start:
        words[0] = SKIP
    memory.head[0] = start + published
    with pytest.raises(CorruptRing):
        reader.try_read()


def test_a_frame_that_runs_over_the_end_is_an_error() -> None:
    memory = fresh_ring(CAPACITY - 16)
    reader = RingReader(memory, None, lambda: "writer")
    memory.data.cast("Q")[(CAPACITY - 16) >> 3] = 24
    memory.head[0] = CAPACITY + 16
    with pytest.raises(CorruptRing, match="a frame of 24 bytes"):
        reader.try_read()


@pytest.mark.parametrize("tail", [2**64 - 8, 24 + CAPACITY, CAPACITY + 12, 0], ids=hex)
def test_an_impossible_tail_is_an_error_that_names_the_reader(tail: int) -> None:
    memory = fresh_ring(CAPACITY)
    writer = RingWriter(memory, None, lambda: "rank 1")
    assert writer.try_write(b"12345678")
    memory.tail[0] = tail
    with pytest.raises(CorruptRing, match="rank 1: tail went from"):
        writer.check()


@given(st.binary(max_size=256), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_no_garbage_makes_the_reader_read_outside(junk: bytes, head: int, length: int) -> None:
    memory = fresh_ring()
    reader = RingReader(memory, None, lambda: "writer")
    memory.data[: len(junk)] = junk
    memory.data.cast("Q")[0] = length
    memory.head[0] = head
    try:
        view = reader.try_read()
    except CorruptRing:
        return
    assert view is None or len(view) + WORD <= head <= CAPACITY


def test_a_fence_comes_before_the_publication() -> None:
    memory = fresh_ring()
    seen: list[tuple[int, int]] = []

    def fence() -> None:
        seen.append((memory.head[0], memory.tail[0]))

    writer = RingWriter(memory, fence, lambda: "reader")
    reader = RingReader(memory, fence, lambda: "writer")
    seen.clear()
    writer.try_write(b"x")
    assert seen == [(0, 0)], "fence before the head is stored"
    reader.try_read()
    assert seen[1:] == [(16, 0)], "fence after the head is loaded"
    reader.release()
    assert seen[2:] == [(16, 0)], "fence before the tail is stored"


def test_only_the_frame_that_was_begun_can_be_gone_on_with() -> None:
    writer, reader = both(fresh_ring())
    long = bytes(4 * CAPACITY)
    assert not writer.try_write(long)
    for other in (b"x", bytes(MAX_PAYLOAD)):
        with pytest.raises(ValueError, match="within another"):
            writer.try_write(other)
    with pytest.raises(ValueError, match="within another"):
        writer.reserve(1)
    while not writer.try_write(long):
        assert reader.try_read() is None
    assert reader.try_read() == reader.try_read() == long
    reader.release()
    assert writer.try_write(b"x") and reader.try_read() == b"x"


@pytest.mark.parametrize("mark", [PART, LAST, PART | LAST, 1 << 60])
@pytest.mark.parametrize("length", [0, 16, CAPACITY, 1 << 40])
def test_a_part_beyond_the_head_is_an_error(mark: int, length: int) -> None:
    memory = fresh_ring()
    writer, reader = both(memory)
    writer.try_write(b"12345678")
    memory.data.cast("Q")[0] = mark | length
    if mark == LAST and not length:
        assert reader.try_read() == b""
        return
    with pytest.raises(CorruptRing, match=r"a frame of"):
        reader.try_read()


def test_no_frame_is_longer_than_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "LONGEST", 3 * CAPACITY)
    writer, reader = both(fresh_ring())
    with pytest.raises(ValueError, match=f"above {3 * CAPACITY}"):
        writer.try_write(bytes(3 * CAPACITY + 1))
    long = bytes(4 * CAPACITY)
    with pytest.raises(CorruptRing, match="a frame of"):
        for _ in range(10):
            with monkeypatch.context() as generous:
                generous.setattr(ring, "LONGEST", len(long))
                assert not writer.try_write(long)
            assert reader.try_read() is None


def test_a_whole_frame_between_parts_is_an_error() -> None:
    memory = fresh_ring()
    writer, reader = both(memory)
    assert not writer.try_write(bytes(4 * CAPACITY))
    lengths = memory.data.cast("Q")
    second = pad_size(lengths[0] & ~PART) >> 3
    lengths[second] &= ~PART
    with pytest.raises(CorruptRing, match="a frame of"):
        reader.try_read()
