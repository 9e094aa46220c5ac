"""What the loop reports to the router: faults, and STEP frames that acknowledge commands."""

from __future__ import annotations

from collections.abc import Iterable

from tgi_trio.ipc.messages import Fault
from tgi_trio.shard.loop import reply_frames
from tgi_trio.shard.loop.image_queue import ImageQueue
from tgi_trio.shard.loop.prefix_orders import PrefixOrders
from tgi_trio.shard.loop.step_columns import Columns
from tgi_trio.shard.loop_channel import Channel


class Reporter:
    """Sends reports, and remembers what the router knows from them."""

    def __init__(self, channel: Channel, images: ImageQueue, prefixes: PrefixOrders) -> None:
        """Report over `channel`.

        Each report includes the images that `images` has seen by then, and how many copies of
        `prefixes` are over.
        """
        self._channel = channel
        self._images = images
        self._prefixes = prefixes
        self._frames = reply_frames.StepFrames()
        self._faults: list[Fault] = []  # not yet sent
        self._acknowledged = 0  # number of the last command the router knows to be applied
        self._stalled = 0  # stalled rows the router knows of
        self._copied = 0  # copies the router knows to be over

    def add_fault(self, sequence: int, message: str) -> None:
        """Include in the next report that a sequence has failed."""
        self._faults.append(Fault(sequence, message))

    def add_faults(self, faults: Iterable[Fault]) -> None:
        """Include all of these in the next report."""
        self._faults.extend(faults)

    def has_news(self, applied: int, stalled: int) -> bool:
        """Whether there is anything to report: a command, stalled rows, copies, faults, images."""
        known = (self._acknowledged, self._stalled, self._copied)
        found = (applied, stalled, self._prefixes.transfers.copied)
        return found != known or bool(self._faults) or bool(self._images.seen)

    def send(self, applied: int, columns: Columns, words: dict[str, int]) -> None:
        """Send the faults that there are, then the STEP frames of `columns`.

        `applied`: the number of the last command that they cover; a later one may have been
        acknowledged since. `words` as STEP has them; those left out are 0, and these two are added.
        """
        if applied > self._acknowledged:
            self._acknowledged = applied
        acknowledged = self._acknowledged
        self._stalled = words.get("stalled_rows", 0)
        most = self._channel.writer.max_payload
        if self._faults:  # before the STEP whose acknowledgement covers them
            for frame in reply_frames.encode_fault_frames(acknowledged, self._faults, most):
                self._channel.send(frame)
            self._faults.clear()
        if self._images.seen:
            columns = columns | self._images.take_computed()
        words["acknowledged"] = acknowledged
        words["copied"] = self._copied = self._prefixes.transfers.copied
        # Control passes to the router's process (`Engine.serve`); this one goes on by itself.
        for frame in self._frames.encode(words, columns, most):
            self._channel.send(frame)
