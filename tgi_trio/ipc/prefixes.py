"""Orders to keep computed prefixes in files and to read them again, as records and as frames."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.ipc.frame_codec import Frame, encode, path_column
from tgi_trio.ipc.frames import Kind


@dataclass(frozen=True, slots=True)
class KeepOrder:
    """Write blocks and states to a file of the rank's (KEEP), which nobody writes meanwhile."""

    folder: Path
    key: bytes  # 16 bytes, new for every order: which files belong together
    blocks: tuple[int, ...]  # of the KV cache, in the order of the file; -n: in place n of the host
    slots: tuple[int, ...] = ()  # of recurrent states, likewise


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


def check_owner(path: Path, found: os.stat_result) -> None:
    """Raise PermissionError if a file is another user's, who could have the model say anything."""
    if found.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to another user ({found.st_uid})")


def encode_keep(command: int, order: KeepOrder) -> bytes:
    """Return a KEEP frame."""
    columns: dict[str, NDArray[Any]] = {
        "folder": path_column(order.folder),
        "key": np.frombuffer(order.key, np.uint8),
        "block_ids": np.array(order.blocks, np.int32),
        "slot_ids": np.array(order.slots, np.int32),
    }
    return encode(Kind.KEEP, {"command": command}, columns)


def decode_keep(frame: Frame) -> KeepOrder:
    """Return what a KEEP frame says."""
    blocks, slots = (tuple(frame.column(name).tolist()) for name in ("block_ids", "slot_ids"))
    return KeepOrder(frame.path("folder"), frame.column("key").tobytes(), blocks, slots)


def encode_restore(command: int, order: RestoreOrder) -> bytes:
    """Return a RESTORE frame."""
    words = {"command": command, "blocks": order.blocks, "slots": order.slots}
    words |= {"host_blocks": order.host_blocks, "host_slots": order.host_slots}
    columns = {"folder": path_column(order.folder), "key": np.frombuffer(order.key, np.uint8)}
    return encode(Kind.RESTORE, words, columns)


def decode_restore(frame: Frame) -> RestoreOrder:
    """Return what a RESTORE frame says."""
    counts = (frame.word(name) for name in ("blocks", "slots", "host_blocks", "host_slots"))
    return RestoreOrder(frame.path("folder"), frame.column("key").tobytes(), *counts)


def encode_prefix_reply(report: PrefixReport) -> bytes:
    """Return a PREFIX_REPLY frame."""
    error = np.frombuffer(report.error.encode("utf-8", "replace"), np.uint8)
    return encode(Kind.PREFIX_REPLY, {"bytes": report.nbytes}, {"error": error})


def decode_prefix_reply(frame: Frame) -> PrefixReport:
    """Return what a PREFIX_REPLY frame says."""
    return PrefixReport(frame.word("bytes"), frame.text("error"))
