"""Checks that queue, batch and pending frees hold each sequence as its state demands."""

from __future__ import annotations

from collections.abc import Iterable

from tgi_trio.router.scheduling.lifecycle import HELD, SequenceState
from tgi_trio.router.scheduling.pending_frees import PendingFrees
from tgi_trio.router.scheduling.queue import WaitingQueue
from tgi_trio.router.scheduling.running_batch import RunningBatch
from tgi_trio.router.scheduling.sequence import Sequence

_IN_BATCH = (SequenceState.PREFILLING, SequenceState.RUNNING)
_ON_THE_WAY_OUT = (SequenceState.PREEMPTED, SequenceState.LEAVING)


def check_states(
    sequences: Iterable[Sequence],
    queue: WaitingQueue,
    batch: RunningBatch,
    pending_frees: PendingFrees,
) -> None:
    """Raise AssertionError if a sequence's state, its blocks and where it is kept disagree."""
    waiting = {sequence.id for sequence in queue}
    count = 0
    for sequence in sequences:
        state, id = sequence.state, sequence.id
        count += 1
        if state is SequenceState.FINISHED:
            raise AssertionError(f"{sequence} is not forgotten")
        if bool(sequence.blocks) != (state in HELD):
            raise AssertionError(f"{sequence} has the blocks of another state")
        if (id in waiting) != (state is SequenceState.WAITING):
            raise AssertionError(f"{sequence} is wrongly in or out of the queue")
        if (id in batch.members) != (state in _IN_BATCH):
            raise AssertionError(f"{sequence} is wrongly in or out of the batch")
        if (id in pending_frees) != (state in _ON_THE_WAY_OUT):
            raise AssertionError(f"{sequence} is wrongly among the departures or not")
    kept = len(queue) + len(batch) + len(list(pending_frees.members))
    if kept != count:
        raise AssertionError(f"{kept} sequences are kept, {count} are known")
