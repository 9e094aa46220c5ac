"""Orders to load and drop adapters, and the shard's reports, as records and as frames."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from tgi_trio.errors import CorruptFrame
from tgi_trio.ipc.frame_codec import Frame, encode, encode_path
from tgi_trio.ipc.frames import FrameKind

_DIGEST: Final = 32  # bytes of a sha256


@dataclass(frozen=True, slots=True)
class AdapterOrder:
    """Load an adapter (LOAD_ADAPTER)."""

    number: int  # never reused; PREFILL rows refer to the adapter by it
    folder: Path
    sha256: bytes = b""  # of the files as first loaded; b"": not loaded before


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """The outcome of an order (ADAPTER_REPLY)."""

    number: int
    error: str = ""  # why it cannot be served; "": loaded
    nbytes: int = 0  # memory that it takes on this rank
    rank: int = 0
    sha256: bytes = b""


def encode_adapter(command: int, order: AdapterOrder) -> bytes:
    """Return a LOAD_ADAPTER frame."""
    columns = {
        "folder": encode_path(order.folder),
        "sha256": np.frombuffer(order.sha256, np.uint8),
    }
    return encode(FrameKind.LOAD_ADAPTER, {"command": command, "adapter": order.number}, columns)


def decode_adapter(frame: Frame) -> AdapterOrder:
    """Return what a LOAD_ADAPTER frame says; raises CorruptFrame."""
    return AdapterOrder(frame.word("adapter"), frame.path("folder"), _digest(frame))


def encode_adapter_reply(report: AdapterReport) -> bytes:
    """Return an ADAPTER_REPLY frame."""
    words = {"adapter": report.number, "bytes": report.nbytes, "rank": report.rank}
    columns = {
        "sha256": np.frombuffer(report.sha256, np.uint8),
        "error": np.frombuffer(report.error.encode("utf-8", "replace"), np.uint8),
    }
    return encode(FrameKind.ADAPTER_REPLY, words, columns)


def decode_adapter_reply(frame: Frame) -> AdapterReport:
    """Return what an ADAPTER_REPLY frame says; raises CorruptFrame."""
    return AdapterReport(
        frame.word("adapter"),
        frame.text("error"),
        frame.word("bytes"),
        frame.word("rank"),
        _digest(frame),
    )


def encode_drop(command: int, number: int) -> bytes:
    """Return a DROP_ADAPTER frame."""
    return encode(FrameKind.DROP_ADAPTER, {"command": command, "adapter": number}, {})


def _digest(frame: Frame) -> bytes:
    digest = frame.column("sha256").tobytes()
    if len(digest) not in (0, _DIGEST):
        raise CorruptFrame(f"{frame.kind.name}: a sha256 of {len(digest)} bytes")
    return digest
