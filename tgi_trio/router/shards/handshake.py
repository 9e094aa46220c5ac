"""The handshake with a new shard: HELLO, INFO, WARMUP; and prefixes. See docs/protocol.md."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Final, TypeVar

from tgi_trio.errors import ProtocolMismatch
from tgi_trio.ipc.adapters import (
    AdapterOrder,
    AdapterReport,
    decode_adapter_reply,
    encode_adapter,
)
from tgi_trio.ipc.command_channel import CommandChannel
from tgi_trio.ipc.frame_codec import Frame, encode
from tgi_trio.ipc.frames import FrameKind
from tgi_trio.ipc.prefixes import (
    KeepOrder,
    PrefixReport,
    RestoreOrder,
    decode_prefix_reply,
    encode_keep,
    encode_restore,
)
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
_REPLIES: Final = (
    FrameKind.STEP,
    FrameKind.FAULT,
    FrameKind.ADAPTER_REPLY,
)  # of what was served before


async def hello(end: CommandChannel, incarnation: int, world_size: int = 1) -> None:
    """Exchange HELLO. Raises ProtocolMismatch if the shard has another wire format."""
    ours = Hello.of_this_process(0, world_size, incarnation)
    await end.send(encode_hello(ours), SEND_TIMEOUT)
    await _receive(end, FrameKind.HELLO, lambda frame: decode_hello(frame, end.describe_peer()))


async def info(end: CommandChannel) -> ShardInfo:
    """Ask for the facts of the model; the answer comes once the weights are loaded."""
    await end.send(encode(FrameKind.INFO, {"command": 0}, {}), SEND_TIMEOUT)
    return await _receive(end, FrameKind.INFO_REPLY, decode_info)


async def load_adapter(end: CommandChannel, order: AdapterOrder) -> AdapterReport:
    """Have the shard load an adapter; returns its report."""
    await end.send(encode_adapter(0, order), SEND_TIMEOUT)
    return await _receive(end, FrameKind.ADAPTER_REPLY, decode_adapter_reply)


async def warm_up(end: CommandChannel, request: WarmupRequest) -> WarmupResult:
    """Have the shard run its largest step and size its KV cache."""
    await end.send(encode_warmup(0, request), SEND_TIMEOUT)
    return await _receive(end, FrameKind.WARMUP_REPLY, decode_warmup_reply)


async def restore_prefixes(end: CommandChannel, order: RestoreOrder) -> PrefixReport:
    """Have all ranks read kept prefixes into the KV cache."""
    await end.send(encode_restore(0, order), SEND_TIMEOUT)
    return await _receive(end, FrameKind.PREFIX_REPLY, decode_prefix_reply)


async def keep_prefixes(
    end: CommandChannel, send: Callable[[bytes], None], order: KeepOrder
) -> PrefixReport:
    """Have all ranks write prefixes, once nothing is served any more; `send`: behind the rest."""
    send(encode_keep(0, order))
    return await _receive(end, FrameKind.PREFIX_REPLY, decode_prefix_reply, _REPLIES)


async def _receive(
    end: CommandChannel,
    kind: FrameKind,
    decode: Callable[[Frame], Record],
    passing: Container[FrameKind] = (FrameKind.STEP,),
) -> Record:
    """Wait for a frame of `kind` and decode it; those of `passing` are skipped.

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
        if frame.kind not in passing:
            raise ProtocolMismatch(
                end.describe_peer(), f"sent {frame.kind.name} where {kind.name} was due"
            )
