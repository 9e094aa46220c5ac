"""The segment: one control page and two rings, as one literal table.

Everything that two processes agree on about a segment is in this file; `docs/ipc.md` draws its
picture from it. What the bytes in the rings mean is `frames.py`'s business.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

LINE = 128  # bytes; two 64-byte cache lines, because x86 prefetches lines in pairs
CONTROL_BYTES = 4096  # the control page comes first, then the request ring, then the reply ring
MUTEX_BYTES = LINE  # room for any libc's pthread_mutex_t (40 bytes on x86-64, 48 on ARM64)
MIN_RING_BYTES = 4096

AWAKE = 0  # sleeping word: the reader is running and will look at its ring by itself
ASLEEP = 1  # sleeping word: the reader is about to block; clear the word and ring its bell
ALWAYS = 2  # sleeping word: the reader has no working fence; ring for every frame


@dataclass(frozen=True)
class Field:
    """One field of the control page; `size` in bytes, 8 means one aligned unsigned word."""

    name: str
    offset: int
    size: int
    writer: str
    meaning: str


FIELDS: tuple[Field, ...] = (
    Field("layout_id", 0 * LINE + 0, 8, "router", "hash of this table; both ends compare it"),
    Field("segment_bytes", 0 * LINE + 8, 8, "router", "size of the whole segment"),
    Field("request_bytes", 0 * LINE + 16, 8, "router", "size of the request ring"),
    Field("reply_bytes", 0 * LINE + 24, 8, "router", "size of the reply ring"),
    Field("incarnation", 0 * LINE + 32, 8, "router", "how often this shard has been started"),
    Field("heartbeat", 1 * LINE + 0, 8, "shard", "grows with every sign of life"),
    Field("phase", 1 * LINE + 8, 8, "shard", "what the shard is doing (frames.Phase)"),
    Field("step", 1 * LINE + 16, 8, "shard", "number of the step in hand"),
    Field("pid", 1 * LINE + 24, 8, "shard", "process id, 0 until it has attached"),
    Field("alive_held", 1 * LINE + 32, 8, "shard", "1 once the shard holds alive_mutex"),
    Field("request_head", 2 * LINE, 8, "router", "bytes ever published to the request ring"),
    Field("request_tail", 3 * LINE, 8, "shard", "bytes ever consumed from the request ring"),
    Field("request_sleeping", 4 * LINE, 8, "both", "does the shard sleep?"),
    Field("reply_head", 5 * LINE, 8, "shard", "bytes ever published to the reply ring"),
    Field("reply_tail", 6 * LINE, 8, "router", "bytes ever consumed from the reply ring"),
    Field("reply_sleeping", 7 * LINE, 8, "both", "does the router sleep?"),
    Field("alive_mutex", 8 * LINE, MUTEX_BYTES, "both", "robust mutex, held while the shard lives"),
)


def find_offset(name: str) -> int:
    """Return the byte offset of a control field."""
    return next(field.offset for field in FIELDS if field.name == name)


def layout_id() -> int:
    """Return the 64-bit hash of the table above; a changed table is another protocol."""
    text = ";".join(f"{field.name}@{field.offset}+{field.size}" for field in FIELDS)
    text = f"{CONTROL_BYTES};{AWAKE},{ASLEEP},{ALWAYS};{text}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def check_ring_bytes(name: str, size: int) -> None:
    """Raise ValueError unless `size` can be the size of a ring: a power of two, >= 4 KiB."""
    if size < MIN_RING_BYTES or size & (size - 1):
        raise ValueError(f"{name} is {size}; allowed: a power of two of at least {MIN_RING_BYTES}")
