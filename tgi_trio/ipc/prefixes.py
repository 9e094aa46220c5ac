"""Orders to keep computed prefixes in files and to read them again, as records and as frames."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.ipc.frame_codec import Frame, encode, encode_path
from tgi_trio.ipc.frames import FrameKind

_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class KeepOrder:
    """Write blocks and states to a file of the rank's (KEEP), which nobody writes meanwhile.

    Or the next part of them, while nobody is served: `before` of the file's blocks and slots are
    there, and `behind` of them are to come. The router has the parts synced to the disk.
    """

    folder: Path
    key: bytes  # 16 bytes, new for every order: which files belong together
    blocks: tuple[int, ...]  # of the KV cache, in the order of the file; -n: in place n of the host
    slots: tuple[int, ...] = ()  # of recurrent states, likewise
    before: tuple[int, int] = (0, 0)
    behind: tuple[int, int] = (0, 0)

    @property
    def begins(self) -> bool:
        """Whether the file is made by this order."""
        return not any(self.before)

    @property
    def is_whole(self) -> bool:
        return self.begins and not any(self.behind)

    def cut(self, blocks: int, slots: int) -> Iterator[KeepOrder]:
        """Yield the parts of a whole order, of at most so many blocks or slots each."""
        counts = len(self.blocks), len(self.slots)
        for at in range(0, counts[0], blocks):
            own = self.blocks[at : at + blocks]
            behind = counts[0] - at - len(own), counts[1]
            yield KeepOrder(self.folder, self.key, own, (), (at, 0), behind)
        for at in range(0, counts[1], slots):
            some = self.slots[at : at + slots]
            behind = 0, counts[1] - at - len(some)
            yield KeepOrder(self.folder, self.key, (), some, (counts[0], at), behind)


@dataclass(frozen=True, slots=True)
class RestoreOrder:
    """Read what was kept into the blocks 1 .. `blocks`, the slots 1 .. `slots`, and what follows in
    the file into the host's memory (RESTORE).
    """

    folder: Path
    key: bytes  # the order's by which they were kept
    blocks: int  # how many of the file's, from the first on
    slots: int
    host_blocks: int = 0  # how many of the next ones, into the places 1 .. this
    host_slots: int = 0  # likewise


@dataclass(frozen=True, slots=True)
class PrefixReport:
    """What came of an order (PREFIX_REPLY)."""

    nbytes: int = 0  # written or read by this rank
    error: str = ""  # "": all ranks have done it


def explain_failure(error: OSError | ValueError) -> str:
    """Return why files of prefixes cannot be written or read, for reports."""
    why = getattr(error, "strerror", None) or str(error)
    if getattr(error, "errno", None) in _NO_ROOM:
        return f"{why}: there must be room for twice --prefix-cache-bytes"
    return why


def check_owner(path: Path, found: os.stat_result) -> None:
    """Raise PermissionError if a file is another user's, who could have the model say anything."""
    if found.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to another user ({found.st_uid})")


def encode_keep(command: int, order: KeepOrder) -> bytes:
    """Return a KEEP frame."""
    columns: dict[str, NDArray[Any]] = {
        "folder": encode_path(order.folder),
        "key": np.frombuffer(order.key, np.uint8),
        "block_ids": np.array(order.blocks, np.int32),
        "slot_ids": np.array(order.slots, np.int32),
    }
    words = {"command": command}
    for name, (blocks, slots) in (("before", order.before), ("behind", order.behind)):
        words |= {f"blocks_{name}": blocks, f"slots_{name}": slots}
    return encode(FrameKind.KEEP, words, columns)


def decode_keep(frame: Frame) -> KeepOrder:
    """Return what a KEEP frame says."""
    blocks, slots = (tuple(frame.column(name).tolist()) for name in ("block_ids", "slot_ids"))
    before, behind = (
        (frame.word(f"blocks_{name}"), frame.word(f"slots_{name}")) for name in ("before", "behind")
    )
    key = frame.column("key").tobytes()
    return KeepOrder(frame.path("folder"), key, blocks, slots, before, behind)


def encode_restore(command: int, order: RestoreOrder) -> bytes:
    """Return a RESTORE frame."""
    words = {"command": command, "blocks": order.blocks, "slots": order.slots}
    words |= {"host_blocks": order.host_blocks, "host_slots": order.host_slots}
    columns = {"folder": encode_path(order.folder), "key": np.frombuffer(order.key, np.uint8)}
    return encode(FrameKind.RESTORE, words, columns)


def decode_restore(frame: Frame) -> RestoreOrder:
    """Return what a RESTORE frame says."""
    counts = (frame.word(name) for name in ("blocks", "slots", "host_blocks", "host_slots"))
    return RestoreOrder(frame.path("folder"), frame.column("key").tobytes(), *counts)


def encode_prefix_reply(report: PrefixReport) -> bytes:
    """Return a PREFIX_REPLY frame."""
    error = np.frombuffer(report.error.encode("utf-8", "replace"), np.uint8)
    return encode(FrameKind.PREFIX_REPLY, {"bytes": report.nbytes}, {"error": error})


def decode_prefix_reply(frame: Frame) -> PrefixReport:
    """Return what a PREFIX_REPLY frame says."""
    return PrefixReport(frame.word("bytes"), frame.text("error"))
