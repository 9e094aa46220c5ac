"""The router's orders about computed prefixes: to keep them in files, and in the host's memory."""

from __future__ import annotations

from tgi_trio.errors import ProtocolMismatch
from tgi_trio.ipc.frame_codec import Frame
from tgi_trio.ipc.prefixes import decode_keep, decode_restore, encode_prefix_reply
from tgi_trio.ipc.transfers import decode_transfers
from tgi_trio.shard.loop.transfers import Transfers
from tgi_trio.shard.loop_channel import Channel
from tgi_trio.shard.runner import Runner


class PrefixOrders:
    """Carries them out, and answers over the channel where an answer is due."""

    def __init__(self, channel: Channel, runner: Runner) -> None:
        self._channel = channel
        self._runner = runner
        self.transfers = Transfers(None)

    def end(self) -> None:
        """Let go of the memory of an earlier warm-up; what was ordered before is void."""
        self.transfers = Transfers(None)

    def begin(self) -> None:
        """Take the memory that a warm-up has allocated."""
        self.transfers = Transfers(self._runner.host_copies)

    def transfer(self, frame: Frame) -> None:
        """Have blocks copied as a TRANSFER frame says."""
        try:
            self.transfers.order(decode_transfers(frame))
        except ValueError as error:
            raise ProtocolMismatch("router", str(error)) from error

    def keep(self, frame: Frame) -> None:
        """Write a file as a KEEP frame says, when no step is in flight."""
        self.transfers.finish()
        report = self._runner.prefixes.keep(decode_keep(frame))
        self._channel.send(encode_prefix_reply(report))

    def restore(self, frame: Frame) -> None:
        """Read a file as a RESTORE frame says."""
        report = self._runner.prefixes.restore(decode_restore(frame))
        self._channel.send(encode_prefix_reply(report))
