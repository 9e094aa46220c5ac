"""The handshake before the first step: HELLO, INFO and WARMUP, as records and as frames.

Both ends of a channel read and write these records, so what one says is what the other hears. A
field travels as the word or column of its name in the frame's row of `frames.FRAMES`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import CorruptFrame, ProtocolMismatch
from tgi_trio.ipc.frame_codec import Frame, encode
from tgi_trio.ipc.frames import LAYOUT_HASH, SPECS, VERSION, FrameKind

BLOCK_SIZE = 16  # tokens per KV block of every backend


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """The first frame each way (HELLO)."""

    rank: int
    world_size: int
    incarnation: int  # how many times the group has been started
    pid: int
    version: int = VERSION
    layout_hash: int = LAYOUT_HASH

    @classmethod
    def of_this_process(cls, rank: int, world_size: int, incarnation: int) -> Hello:
        """Return this process's HELLO."""
        return cls(rank=rank, world_size=world_size, incarnation=incarnation, pid=os.getpid())


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardInfo:
    """Static facts of a loaded model, and of what serves it (INFO_REPLY)."""

    vocab_size: int
    block_size: int  # tokens per KV block
    layers: int  # that hold KV
    kv_bytes_per_token: int
    max_positions: int  # 0 = unbounded
    eos_ids: tuple[int, ...]
    dtype: str
    device: str
    backend: str
    load_ns: int
    device_name: str = ""  # what a device's maker calls it; empty for a CPU
    # False where a token's K and V depend on more than the tokens before it (rotary frequencies
    # that change with the length), or are not in the blocks at all (a cache of transformers' own).
    prefix_reuse: bool = True
    # Query tokens of a step up to which one more costs little: drafts (`StepPlan.drafts`) fill a
    # step up to here. 0: plans may have no drafts.
    draft_budget: int = 0
    # Of a slot of states, see `model/specs/mixers.py`; 0: the model keeps none. A sequence has two.
    state_bytes: int = 0
    # Why more ranks could not divide a model that runs through transformers; "": another model, or
    # they could, as far as is known before they try.
    undivided: str = ""

    @property
    def speculates(self) -> bool:
        """Whether a step may hold drafts of further tokens."""
        return self.draft_budget > 0


@dataclass(frozen=True, slots=True)
class WarmupRequest:
    """What the KV cache has to be sized for (WARMUP)."""

    max_prefill_tokens: int
    max_total_tokens: int
    max_batch_size: int
    max_batch_total_tokens: int  # 0 = as many as memory allows
    adapters_to_come: int = 0  # that may be loaded later, beside those that are in memory by then
    max_images: int = 0  # of a sequence
    tower_bytes: int = 0  # that a tower takes of a device for the largest image, between two steps
    # What the server's first shard has found, for those that follow it; 0: this is the first.
    blocks: int = 0  # block 0 included
    state_slots: int = 0  # slot 0 included; 0: the model keeps none


@dataclass(frozen=True, slots=True)
class WarmupResult:
    """The results of the warm-up (WARMUP_REPLY); bytes, nanoseconds."""

    blocks: int  # block 0, which is never handed out, included
    block_size: int
    weight_bytes: int
    activation_bytes: int
    kv_bytes: int
    spare_bytes: int
    warmup_ns: int
    state_slots: int = 0  # slot 0, which is never handed out, included; 0: the model keeps none
    state_bytes: int = 0  # of all slots
    host_blocks: int = 0  # of cached prefixes, in the host's memory; 0: none are kept there
    host_slots: int = 0  # of states, likewise
    host_bytes: int = 0  # of all of both, this rank


_NAMES = ("dtype", "device", "backend", "device_name", "undivided")  # lines of INFO_REPLY's `names`


def encode_hello(hello: Hello) -> bytes:
    """Return a HELLO frame."""
    return encode(FrameKind.HELLO, _words(FrameKind.HELLO, hello), {})


def decode_hello(frame: Frame, peer: str) -> Hello:
    """Return what the first frame of `peer` says.

    Raises ProtocolMismatch unless it is a HELLO of our own version and layout.
    """
    if frame.kind is not FrameKind.HELLO:
        raise ProtocolMismatch(peer, f"its first frame is {frame.kind.name}, not HELLO")
    hello = Hello(**_values(frame))
    if (hello.version, hello.layout_hash) != (VERSION, LAYOUT_HASH):
        raise ProtocolMismatch(
            peer,
            f"speaks protocol {hello.version} layout {hello.layout_hash:016x}, this end speaks "
            f"{VERSION} layout {LAYOUT_HASH:016x}: both must come from the same tgi-trio "
            "installation",
        )
    return hello


def encode_info(command: int, info: ShardInfo) -> bytes:
    """Return the INFO_REPLY to `command`; a name's line breaks become spaces."""
    names = "\n".join(" ".join(getattr(info, name).splitlines()) for name in _NAMES).encode()
    columns: dict[str, NDArray[Any]] = {
        "eos_ids": np.array(info.eos_ids, np.int32),
        "names": np.frombuffer(names, np.uint8),
    }
    return encode(
        FrameKind.INFO_REPLY, {"command": command} | _words(FrameKind.INFO_REPLY, info), columns
    )


def decode_info(frame: Frame) -> ShardInfo:
    """Return what an INFO_REPLY says; raises CorruptFrame when a name is missing."""
    values, names = _values(frame), frame.text("names").split("\n")
    if len(names) != len(_NAMES):
        raise CorruptFrame(f"INFO_REPLY: {len(names)} names, expected {len(_NAMES)}")
    values |= zip(_NAMES, names, strict=True)
    values["prefix_reuse"] = bool(values["prefix_reuse"])
    return ShardInfo(**values, eos_ids=tuple(frame.column("eos_ids").tolist()))


def encode_warmup(command: int, request: WarmupRequest) -> bytes:
    """Return a WARMUP frame."""
    return encode(FrameKind.WARMUP, {"command": command} | _words(FrameKind.WARMUP, request), {})


def decode_warmup(frame: Frame) -> WarmupRequest:
    """Return what a WARMUP asks for."""
    return WarmupRequest(**_values(frame))


def encode_warmup_reply(command: int, found: WarmupResult) -> bytes:
    """Return the WARMUP_REPLY to `command`."""
    return encode(
        FrameKind.WARMUP_REPLY, {"command": command} | _words(FrameKind.WARMUP_REPLY, found), {}
    )


def decode_warmup_reply(frame: Frame) -> WarmupResult:
    """Return what a WARMUP_REPLY says."""
    return WarmupResult(**_values(frame))


def _words(kind: FrameKind, record: object) -> dict[str, int]:
    """Return the words of a frame that are fields of `record`: all but the command's number."""
    names = (name for name, _ in SPECS[kind].words if name != "command")
    return {name: int(getattr(record, name)) for name in names}


def _values(frame: Frame) -> dict[str, Any]:
    """Return the words of a frame but the command's number; Any: they become fields of a record."""
    return {name: frame.word(name) for name, _ in frame.spec.words if name != "command"}
