"""The handshake with a new shard: HELLO, INFO, WARMUP. See docs/protocol.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tgi_trio.errors import ProtocolMismatch
from tgi_trio.ipc.adapters import (
    AdapterOrder,
    AdapterReport,
    decode_adapter_reply,
    encode_adapter,
)
from tgi_trio.ipc.command_channel import CommandChannel
from tgi_trio.ipc.frame_codec import Frame, encode
from tgi_trio.ipc.frames import Kind
from tgi_trio.ipc.startup import (
    Hello,
    ShardInfo,
    WarmupRequest,
    WarmupResult,
    decode_hello,
    decode_info,
    decode_warmup_reply,
    encode_hello,
    encode_warmup,
)

SEND_TIMEOUT = 10.0  # seconds; not needed in practice, since the ring is still empty

Record = TypeVar("Record")


async def hello(end: CommandChannel, incarnation: int, world_size: int = 1) -> None:
    """Exchange HELLO. Raises ProtocolMismatch if the shard has another wire format."""
    ours = Hello.of_this_process(0, world_size, incarnation)
    await end.send(encode_hello(ours), SEND_TIMEOUT)
    await _receive(end, Kind.HELLO, lambda frame: decode_hello(frame, end.describe_peer()))


async def info(end: CommandChannel) -> ShardInfo:
    """Ask for the facts of the model; the answer comes once the weights are loaded."""
    await end.send(encode(Kind.INFO, {"command": 0}, {}), SEND_TIMEOUT)
    return await _receive(end, Kind.INFO_REPLY, decode_info)


async def load_adapter(end: CommandChannel, order: AdapterOrder) -> AdapterReport:
    """Have the shard load an adapter; returns its report."""
    await end.send(encode_adapter(0, order), SEND_TIMEOUT)
    return await _receive(end, Kind.ADAPTER_REPLY, decode_adapter_reply)


async def warm_up(end: CommandChannel, request: WarmupRequest) -> WarmupResult:
    """Have the shard run its largest step and size its KV cache."""
    await end.send(encode_warmup(0, request), SEND_TIMEOUT)
    return await _receive(end, Kind.WARMUP_REPLY, decode_warmup_reply)


async def _receive(end: CommandChannel, kind: Kind, decode: Callable[[Frame], Record]) -> Record:
    """Wait for a frame of `kind` and decode it; acknowledgements are skipped.

    There is no timeout here: the supervisor watches for the shard's death and signals meanwhile.
    """
    while True:
        while (view := end.try_receive()) is None:
            await end.wait()
        frame = Frame(view)
        try:
            if frame.kind is kind:
                return decode(frame)
        finally:
            end.release()
        if frame.kind is not Kind.STEP:
            raise ProtocolMismatch(
                end.describe_peer(), f"sent {frame.kind.name} where {kind.name} was due"
            )
