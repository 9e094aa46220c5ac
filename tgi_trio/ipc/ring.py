"""A single-producer single-consumer (SPSC) ring of byte frames in shared memory.

A frame is a word with its length, then the bytes, padded to 8. Frames do not wrap: if one does not
fit before the end of the ring, a SKIP word sends the reader to the start. Head and tail count bytes
since the beginning and do not wrap either (2**64 bytes last for centuries), so `head == tail` is
empty and `head - tail == capacity` is full. There are no locks: a process that dies in the middle
of writing has not published the head, so its frame does not exist.

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
        self._head = self._next = memory.head[0]
        self._tail = memory.tail[0]  # a lower bound of the reader's tail, read again when needed
        self.check()

    def reserve(self, size: int) -> memoryview | None:
        """Return `size` writable bytes, 8-byte aligned, or None if there is no room now.

        Nothing is visible to the reader before `commit()`. Reserving again replaces the first
        reservation. Raises ValueError if `size` can never fit, CorruptRing if the reader's tail is
        impossible.
        """
        offset = self._place(size)
        return None if offset < 0 else self._data[offset : offset + size]

    def commit(self) -> None:
        """Publish the reserved frame to the reader; does nothing without a reservation."""
        if self._publish is not None:
            self._publish()
        self._shared_head[0] = self._head = self._next  # last: this store publishes the frame

    def try_write(self, payload: bytes | memoryview) -> bool:
        """Copy `payload` (u8) and publish it; returns False if there is no room now.

        Raises ValueError if it can never fit, CorruptRing if the reader's tail is impossible.
        """
        size = len(payload)
        offset = self._place(size)
        if offset < 0:
            return False
        self._data[offset : offset + size] = payload
        if self._publish is not None:
            self._publish()
        self._shared_head[0] = self._head = self._next
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
        if size > self.max_payload or size < 0:
            raise ValueError(f"a frame of {size} bytes; allowed: 0 to {self.max_payload}")
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
        "_lengths",
        "_next",
        "_publish",
        "_shared_head",
        "_shared_tail",
        "_tail",
        "_who",
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
        self._tail = self._next = memory.tail[0]
        self.check()

    def empty(self) -> bool:
        """Return whether there is nothing to read: one load from shared memory."""
        return self._shared_head[0] == self._tail

    def try_read(self) -> memoryview | None:
        """Return the next frame as a read-only view (u8) into the ring, or None when empty.

        The view is valid until `release()`; reading again before that gives the same frame.
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
            raise CorruptRing(
                self._who(), f"a frame of {size} bytes at {tail} with the head at {head}"
            )
        self._next = end
        return self._data[offset : offset + size]

    def release(self) -> None:
        """Free the bytes of the frame that was read."""
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
