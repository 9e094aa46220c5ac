"""Does every sequence stand where its state says?"""

from __future__ import annotations

from collections.abc import Iterable

from tgi_trio.router.scheduling.batch import Batch
from tgi_trio.router.scheduling.departures import Departures
from tgi_trio.router.scheduling.lifecycle import HELD, State
from tgi_trio.router.scheduling.queue import WaitingQueue
from tgi_trio.router.scheduling.sequence import Sequence

_IN_BATCH = (State.PREFILLING, State.RUNNING)
_ON_THE_WAY_OUT = (State.PREEMPTED, State.LEAVING)


def check_states(
    sequences: Iterable[Sequence], queue: WaitingQueue, batch: Batch, departures: Departures
) -> None:
    """Raise AssertionError when states, blocks and the places a sequence is kept in disagree."""
    waiting = {sequence.id for sequence in queue}
    count = 0
    for sequence in sequences:
        state, id = sequence.state, sequence.id
        count += 1
        if state is State.FINISHED:
            raise AssertionError(f"{sequence} is not forgotten")
        if bool(sequence.blocks) != (state in HELD):
            raise AssertionError(f"{sequence} has the blocks of another state")
        if (id in waiting) != (state is State.WAITING):
            raise AssertionError(f"{sequence} is wrongly in or out of the queue")
        if (id in batch.members) != (state in _IN_BATCH):
            raise AssertionError(f"{sequence} is wrongly in or out of the batch")
        if (id in departures) != (state in _ON_THE_WAY_OUT):
            raise AssertionError(f"{sequence} is wrongly among the departures or not")
    kept = len(queue) + len(batch) + len(list(departures.members))
    if kept != count:
        raise AssertionError(f"{kept} sequences are kept, {count} are known")
