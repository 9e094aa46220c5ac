"""A single-producer single-consumer (SPSC) ring of byte frames in shared memory.

A frame is a word with its length, then the bytes, padded to 8. Frames do not wrap: if one does not
fit before the end of the ring, a SKIP word sends the reader to the start. Head and tail count bytes
since the beginning and do not wrap either (2**64 bytes last for centuries), so `head == tail` is
empty and `head - tail == capacity` is full. There are no locks: a process that dies in the middle
of writing has not published the head, so its frame does not exist.

A frame that is longer than half the ring travels in parts, marked in their length words. The writer
goes on with it as the reader takes parts out and joins them, so a ring of any size carries frames
of any length.

Each side keeps its own counter privately and never reads it back from shared memory, where a faulty
peer could overwrite it. What the peer writes (the other counter, the lengths) is checked before it
is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tgi_trio.errors import CorruptRing
from tgi_trio.ipc.fence import Fence

WORD = 8
SKIP = 2**64 - 1
PART = 1 << 62  # in a length word: a part of a longer frame follows
LAST = 1 << 61  # the last one
LONGEST = 1 << 32  # bytes of a frame in parts: more is taken for a faulty writer


def pad_size(size: int) -> int:
    """Return the bytes a frame of `size` bytes takes in a ring, length word included."""
    return WORD + ((size + 7) & -8)


@dataclass(frozen=True)
class RingMemory:
    """Where a ring lives: views of one segment."""

    head: memoryview  # u64 [1], written by the writer
    tail: memoryview  # u64 [1], written by the reader
    data: memoryview  # u8 [capacity]; capacity is a power of two


class RingWriter:
    """The producer. One per ring, used by one thread."""

    __slots__ = (
        "_data",
        "_head",
        "_lengths",
        "_next",
        "_publish",
        "_sent",
        "_shared_head",
        "_shared_tail",
        "_tail",
        "_who",
        "capacity",
        "max_payload",
    )

    def __init__(self, memory: RingMemory, publish: Fence | None, who: Callable[[], str]) -> None:
        """`publish`: the machine's publish fence, None on TSO. `who` describes the reader."""
        self._shared_head = memory.head
        self._shared_tail = memory.tail
        self._data = memory.data
        self._lengths = memory.data.cast("Q")
        self._publish = publish
        self._who = who
        self.capacity = len(memory.data)
        # Half the ring: such a frame fits an empty ring wherever its head stands.
        self.max_payload = self.capacity // 2 - WORD
        self._sent = 0  # bytes of a frame in parts that have been published
        self._head = self._next = memory.head[0]
        self._tail = memory.tail[0]  # a lower bound of the reader's tail, read again when needed
        self.check()

    def reserve(self, size: int) -> memoryview | None:
        """Return `size` writable bytes, 8-byte aligned, or None if there is no room now.

        Nothing is visible to the reader before `commit()`. Reserving again replaces the first
        reservation. Raises ValueError if `size` can never fit in one piece, CorruptRing if the
        reader's tail is impossible.
        """
        if self._sent or not 0 <= size <= self.max_payload:
            within = " within another" if self._sent else ""
            allowed = f"allowed: 0 to {self.max_payload}"
            raise ValueError(f"a frame of {size} bytes{within}; {allowed}")
        offset = self._place(size)
        return None if offset < 0 else self._data[offset : offset + size]

    def commit(self) -> None:
        """Publish the reserved frame to the reader; does nothing without a reservation."""
        if self._publish is not None:
            self._publish()
        self._shared_head[0] = self._head = self._next  # last: this store publishes the frame

    def try_write(self, payload: bytes | memoryview) -> bool:
        """Copy `payload` (u8) and publish it; returns False if there is no room now.

        Of one that is longer than `max_payload` parts may have been published then: it has to be
        given again until this is True, before any other. Raises ValueError if another is given, or
        one longer than LONGEST, and CorruptRing if the reader's tail is impossible.
        """
        size = len(payload)
        if size > self.max_payload or self._sent:
            return self._write_parts(payload)
        offset = self._place(size)
        if offset < 0:
            return False
        self._data[offset : offset + size] = payload
        if self._publish is not None:
            self._publish()
        self._shared_head[0] = self._head = self._next
        return True

    def _write_parts(self, payload: bytes | memoryview) -> bool:
        """Publish as many parts as there is room for; returns whether that was the last."""
        size, most = len(payload), self.max_payload // 2
        if not self.max_payload < size <= LONGEST:
            raise ValueError(f"a frame of {size} bytes; within another, or above {LONGEST}")
        left = memoryview(payload)[self._sent :]
        while left:
            part, left = left[:most], left[most:]
            offset = self._place(len(part))
            if offset < 0:
                return False
            self._data[offset : offset + len(part)] = part
            self._lengths[(offset - WORD) >> 3] = len(part) | (PART if left else LAST)
            self.commit()
            self._sent += len(part)
        self._sent = 0
        return True

    def _place(self, size: int) -> int:
        """Write the next frame's length word; returns the offset of its bytes, -1 for no room."""
        head = self._head
        capacity = self.capacity
        offset = head & (capacity - 1)
        space = WORD + ((size + 7) & -8)
        end = head + space
        skipping = offset + space > capacity
        if skipping:
            end += capacity - offset
        if end - self._tail > capacity:
            self._refresh_tail()
            if end - self._tail > capacity:
                return -1
        if skipping:
            self._lengths[offset >> 3] = SKIP
            offset = 0
        self._lengths[offset >> 3] = size
        self._next = end
        return offset + WORD

    @property
    def sent(self) -> int:
        """Number of bytes published of a frame in parts; 0 when it is whole."""
        return self._sent

    @property
    def free(self) -> int:
        """Number of free bytes, by the reader's present tail."""
        self._refresh_tail()
        return self.capacity - (self._head - self._tail)

    def check(self) -> None:
        """Raise CorruptRing unless both counters can be true."""
        self._refresh_tail()
        if self._shared_head[0] != self._head or self._head % WORD:
            raise CorruptRing(self._who(), f"head is {self._shared_head[0]}, not {self._head}")

    def _refresh_tail(self) -> None:
        tail = self._shared_tail[0]
        if self._publish is not None:
            self._publish()  # the reader's last loads come before our overwriting stores
        if not self._tail <= tail <= self._head or tail % WORD:
            raise CorruptRing(
                self._who(),
                f"tail went from {self._tail} to {tail} with the head at {self._head}",
            )
        self._tail = tail


class RingReader:
    """The consumer. One per ring, used by one thread."""

    __slots__ = (
        "_capacity",
        "_data",
        "_joined",
        "_lengths",
        "_next",
        "_publish",
        "_shared_head",
        "_shared_tail",
        "_tail",
        "_who",
        "_whole",
    )

    def __init__(self, memory: RingMemory, publish: Fence | None, who: Callable[[], str]) -> None:
        """`publish`: the machine's publish fence, None on TSO. `who` describes the writer."""
        self._shared_head = memory.head
        self._shared_tail = memory.tail
        self._data = memory.data.toreadonly()
        self._lengths = memory.data.cast("Q")
        self._publish = publish
        self._who = who
        self._capacity = len(memory.data)
        self._joined = bytearray()  # the parts of a frame that have been read
        self._whole: memoryview | None = None  # they are all, and not released
        self._tail = self._next = memory.tail[0]
        self.check()

    def empty(self) -> bool:
        """Return whether there is nothing to read: one load from shared memory."""
        return self._shared_head[0] == self._tail

    def try_read(self) -> memoryview | None:
        """Return the next frame as a read-only view (u8) into the ring, or None when empty.

        The view is valid until `release()`; reading again before that gives the same frame. Parts
        of a longer one are taken out of the ring and joined: None until the last is there.
        Raises CorruptRing when the writer's head or length is impossible.
        """
        tail = self._tail
        head = self._shared_head[0]
        if head == tail:
            return None
        if self._publish is not None:
            self._publish()
        capacity = self._capacity
        if head - tail > capacity or head & 7:
            raise CorruptRing(self._who(), f"head is {head} with the tail at {tail}")
        offset = tail & (capacity - 1)
        size = self._lengths[offset >> 3]
        if size == SKIP:
            tail += capacity - offset
            offset = 0
            # A skip is published only with a frame behind it: a head that ends here is corrupt.
            size = self._lengths[0] if tail < head else SKIP
        end = tail + WORD + ((size + 7) & -8)
        offset += WORD
        if end > head or offset + size > capacity:  # true also for a head behind the tail
            return self._read_parts(tail, offset, size, head)
        self._next = end
        return self._data[offset : offset + size]

    def _read_parts(self, tail: int, offset: int, word: int, head: int) -> memoryview | None:
        """Take parts out of the ring; returns the frame if the last one is there.

        `tail`, `offset`, `word`: where the first one is, its bytes, and its length word.
        """
        while self._whole is None:
            size, kind = word & ~(PART | LAST), word & (PART | LAST)
            end = tail + pad_size(size)
            if word == SKIP or kind not in (PART, LAST) or end > head:
                raise self._corrupt(word, tail, head)
            if offset + size > self._capacity or len(self._joined) + size > LONGEST:
                raise self._corrupt(word, tail, head)
            self._joined += self._data[offset : offset + size]
            self._next = end
            if kind == LAST:  # it stays in the ring until it is released, as any frame does
                self._whole = memoryview(self._joined).toreadonly()
                break
            self._free()
            tail, head = end, self._shared_head[0]
            if head == tail:
                return None
            offset = tail & (self._capacity - 1)
            word = self._lengths[offset >> 3]
            if word == SKIP:
                tail += self._capacity - offset
                offset, word = 0, self._lengths[0] if tail < head else SKIP
            offset += WORD
            if not word & (PART | LAST):
                raise self._corrupt(word, tail, head)
        return self._whole

    def _corrupt(self, size: int, tail: int, head: int) -> CorruptRing:
        return CorruptRing(
            self._who(), f"a frame of {size} bytes at {tail} with the head at {head}"
        )

    def release(self) -> None:
        """Free the bytes of the frame that was read."""
        if self._whole is not None:
            self._whole, self._joined = None, bytearray()
        if self._publish is not None:
            self._publish()
        self._shared_tail[0] = self._tail = self._next

    def _free(self) -> None:
        """Free the bytes of a part."""
        if self._publish is not None:
            self._publish()
        self._shared_tail[0] = self._tail = self._next

    def check(self) -> None:
        """Raise CorruptRing unless both counters can be true."""
        head = self._shared_head[0]
        if not 0 <= head - self._tail <= self._capacity or head % WORD or self._tail % WORD:
            raise CorruptRing(self._who(), f"head is {head} with the tail at {self._tail}")
        if self._shared_tail[0] != self._tail:
            raise CorruptRing(self._who(), f"tail is {self._shared_tail[0]}, not {self._tail}")
