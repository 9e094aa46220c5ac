"""The first conversation with a shard: HELLO, INFO, WARMUP. See docs/protocol.md."""

from __future__ import annotations

import os
from dataclasses import dataclass

from tgi_trio.errors import ProtocolMismatch
from tgi_trio.ipc.command_channel import CommandChannel
from tgi_trio.ipc.frames import LAYOUT_HASH, VERSION, Frame, Kind, encode

SEND_TIMEOUT = 10.0  # seconds; the ring is empty at this point, so this is never waited for


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """INFO_REPLY as the router keeps it."""

    vocab_size: int
    block_size: int
    kv_bytes_per_token: int
    max_positions: int  # 0 = unbounded
    prefix_reuse: bool  # blocks computed for one sequence may serve another
    speculates: bool  # a step may hold guesses of further tokens
    eos_ids: tuple[int, ...]
    dtype: str
    device: str
    backend: str
    load_ns: int
    device_name: str = ""  # what a device's maker calls it; empty for a CPU


@dataclass(frozen=True, slots=True)
class KVMemory:
    """WARMUP_REPLY as the router keeps it; bytes and nanoseconds."""

    blocks: int
    block_size: int
    weight_bytes: int
    activation_bytes: int
    kv_bytes: int
    spare_bytes: int
    warmup_ns: int


@dataclass(frozen=True, slots=True)
class WarmupLimits:
    """What the KV cache must be sized for."""

    max_prefill_tokens: int
    max_total_tokens: int
    max_batch_size: int
    max_batch_total_tokens: int  # 0 = as many as memory allows


async def hello(end: CommandChannel, incarnation: int, world_size: int = 1) -> None:
    """Exchange HELLO; raises ProtocolMismatch when the shard reads the wire differently."""
    words = {
        "version": VERSION,
        "layout_hash": LAYOUT_HASH,
        "rank": 0,
        "world_size": world_size,
        "pid": os.getpid(),
        "incarnation": incarnation,
    }
    await end.send(encode(Kind.HELLO, words, {}), SEND_TIMEOUT)
    theirs = await _reply(end, Kind.HELLO)
    if (theirs["version"], theirs["layout_hash"]) != (VERSION, LAYOUT_HASH):
        raise ProtocolMismatch(
            end.describe_peer(),
            f"speaks protocol {theirs['version']} layout {theirs['layout_hash']:x}, this router "
            f"speaks {VERSION} layout {LAYOUT_HASH:x}: both must come from the same installation",
        )


async def info(end: CommandChannel) -> ShardFacts:
    """Ask for the model's facts; the answer comes when the weights are loaded."""
    await end.send(encode(Kind.INFO, {"command": 0}, {}), SEND_TIMEOUT)
    frame = await _next(end, Kind.INFO_REPLY)
    try:
        dtype, device, backend, name = (*frame.text("names").split("\n"), "", "", "", "")[:4]
        return ShardFacts(
            vocab_size=frame.word("vocab_size"),
            block_size=frame.word("block_size"),
            kv_bytes_per_token=frame.word("kv_bytes_per_token"),
            max_positions=frame.word("max_positions"),
            prefix_reuse=bool(frame.word("prefix_reuse")),
            speculates=bool(frame.word("speculates")),
            eos_ids=tuple(frame.column("eos_ids").tolist()),
            dtype=dtype,
            device=device,
            backend=backend,
            device_name=name,
            load_ns=frame.word("load_ns"),
        )
    finally:
        end.release()


async def warm_up(end: CommandChannel, limits: WarmupLimits) -> KVMemory:
    """Have the shard run its largest step and size its KV cache."""
    words = {name: getattr(limits, name) for name in limits.__dataclass_fields__}
    await end.send(encode(Kind.WARMUP, {"command": 0, **words}, {}), SEND_TIMEOUT)
    reply = await _reply(end, Kind.WARMUP_REPLY)
    return KVMemory(**{name: reply[name] for name in KVMemory.__dataclass_fields__})


async def _next(end: CommandChannel, kind: Kind) -> Frame:
    """Wait for a frame of `kind`, to be released by the caller; acknowledgements are skipped.

    Without a limit of its own: the supervisor watches over death and signals meanwhile.
    """
    while True:
        while (view := end.try_receive()) is None:
            await end.wait()
        frame = Frame(view)
        if frame.kind is kind:
            return frame
        end.release()
        if frame.kind is not Kind.STEP:
            raise ProtocolMismatch(
                end.describe_peer(), f"sent {frame.kind.name} where {kind.name} was due"
            )


async def _reply(end: CommandChannel, kind: Kind) -> dict[str, int]:
    """Wait for a frame of `kind` and return its words."""
    frame = await _next(end, kind)
    words = {name: frame.word(name) for name, _ in frame.spec.words}
    end.release()
    return words
