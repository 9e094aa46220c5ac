"""Counts the turns of trio's loop: what runs between two looks at the sockets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import trio


class Turns(trio.abc.Instrument):
    """Counts turns, and the times that a task was woken."""

    def __init__(self) -> None:
        self.count = 0
        self.steps = 0

    def after_io_wait(self, timeout: float) -> None:
        self.count += 1

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.steps += 1


@contextmanager
def counted_turns() -> Iterator[Turns]:
    """Count them within the block."""
    turns = Turns()
    trio.lowlevel.add_instrument(turns)
    try:
        yield turns
    finally:
        trio.lowlevel.remove_instrument(turns)
