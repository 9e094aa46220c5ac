"""Commands to and replies from one incarnation of a shard group, as typed messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final

import trio

from tgi_trio.ipc.command_channel import CommandChannel
from tgi_trio.ipc.frame_codec import Frame, encode
from tgi_trio.ipc.frames import FrameKind
from tgi_trio.ipc.messages import encode_extend, encode_filter, encode_prefill
from tgi_trio.ipc.prefixes import KeepOrder, PrefixReport, encode_keep
from tgi_trio.ipc.transfers import encode_transfers
from tgi_trio.router.scheduling.shard_commands import (
    Command,
    Copy,
    Extend,
    Filter,
    Limits,
    Prefill,
)

_TRY_AGAIN_S: Final = 0.001  # the shard copies half a MiB of a prompt out of the ring in a tenth


def encode_command(command: Command) -> bytes:
    """Return the frame of a scheduler command."""
    match command:
        case Prefill():
            return encode_prefill(command.number, command.rows)
        case Extend():
            return encode_extend(command.number, command.rows)
        case Copy():
            return encode_transfers(command.number, command.transfers)
        case Filter():
            return encode_filter(command.number, command.sequences)
        case Limits():
            words = {"command": command.number, "token_budget": command.token_budget}
            return encode(FrameKind.LIMITS, words, {})


class ShardLink:
    """Sends commands in order without blocking: those for which the ring has no room wait here.

    The backlog is bounded by the scheduler, which admits no more than `max_batch_prefill_tokens`
    prompt tokens that are not computed yet.
    """

    def __init__(self, end: CommandChannel) -> None:
        self._end = end
        self._backlog: deque[bytes | Prefill] = deque()
        self._waiting = trio.Event()  # there is a backlog
        self._answered = trio.Event()  # the last order to keep prefixes is
        self._report = PrefixReport()

    def send(self, command: Command) -> None:
        """Send a command now, or as soon as the ring has room.

        A long prompt is encoded in a turn of its own: a million tokens take milliseconds, as
        granting their blocks does, from where we are called.
        """
        if isinstance(command, Prefill) and command.is_long:
            self._backlog.append(command)
        elif self._backlog and isinstance(self._backlog[0], Prefill):
            self._backlog.append(encode_command(command))
        else:
            self.send_frame(encode_command(command))
            return
        self._waiting.set()

    def send_frame(self, frame: bytes) -> None:
        """Send an encoded command, as those of adapters are."""
        self._backlog.append(frame)
        # Control passes to the shard's process, which takes the frame between two steps
        # (`Worker._drain`); its answers come to `Engine.serve`.
        self.flush()
        if self._backlog:
            self._waiting.set()

    async def send_waiting(self) -> None:
        """Send what waits for room as the shard makes it, until cancelled.

        A shard that replies has made room, but for the next part of a long prompt it makes room
        without having anything to reply to: nothing wakes us then, however long we sleep.
        """
        while True:
            await self._waiting.wait()
            while self._backlog:
                await trio.sleep(_TRY_AGAIN_S)
                self.flush()
            self._waiting = trio.Event()

    async def keep_prefixes(self, order: KeepOrder) -> PrefixReport:
        """Have all ranks write prefixes while nobody is served; one order at a time."""
        self._answered = trio.Event()
        self.send_frame(encode_keep(0, order))
        await self._answered.wait()
        return self._report

    def settle_keep(self, report: PrefixReport) -> None:
        """Pass on what came of such an order."""
        self._report = report
        self._answered.set()

    def flush(self) -> None:
        """Send waiting frames, in order, as far as the ring has room."""
        while self._backlog:
            if isinstance(first := self._backlog[0], Prefill):
                first = self._backlog[0] = encode_command(first)
            if not self._end.try_send(first):
                return
            self._backlog.popleft()

    def replies(self) -> Iterator[Frame]:
        """Yield the replies that have arrived; each is valid until the next one is requested."""
        while (view := self._end.try_receive()) is not None:
            try:
                yield Frame(view)
            finally:
                self._end.release()

    async def wait(self) -> None:
        """Sleep until there may be replies."""
        await self._end.wait()
