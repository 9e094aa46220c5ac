"""All sequences, and the moves between queue, running batch and pending frees as states change."""

from __future__ import annotations

from tgi_trio.router.scheduling.image_pins import ImagePins
from tgi_trio.router.scheduling.invariants import check_states
from tgi_trio.router.scheduling.kv_memory import KvMemory
from tgi_trio.router.scheduling.lifecycle import SequenceEvent, SequenceState
from tgi_trio.router.scheduling.pending_frees import PendingFrees
from tgi_trio.router.scheduling.queue import WaitingQueue
from tgi_trio.router.scheduling.running_batch import RunningBatch
from tgi_trio.router.scheduling.sequence import Sequence


class SequenceTable:
    """All sequences, and their moves between queue, batch and pending frees."""

    def __init__(
        self, queue: WaitingQueue, batch: RunningBatch, memory: KvMemory, pins: ImagePins
    ) -> None:
        self._pins = pins
        self._queue = queue
        self._batch = batch
        self._memory = memory
        self.pending_frees = PendingFrees()
        self.living: dict[int, Sequence] = {}  # by id; all that have not finished
        self.ended: dict[int, Sequence] = {}  # that the last report has ended, for `find`

    def enter(self, sequence: Sequence) -> None:
        """Add a new sequence to the queue."""
        self.living[sequence.id] = sequence
        self._queue.add(sequence)

    def find_listening(self, sequence_id: int) -> Sequence | None:
        """Return a sequence whose client still wants tokens; None otherwise."""
        sequence = self.living.get(sequence_id)
        return None if sequence is None or sequence.state is SequenceState.LEAVING else sequence

    def leave(self, sequence: Sequence) -> None:
        """End a sequence of which the client wants no more tokens."""
        if sequence.state is SequenceState.WAITING:
            self._queue.remove(sequence)
            sequence.advance(SequenceEvent.LEAVE)
            del self.living[sequence.id]
        elif sequence.state is SequenceState.PREEMPTED:
            sequence.advance(SequenceEvent.LEAVE)  # its FILTER is on the way already
        else:
            self.drop(sequence, SequenceEvent.LEAVE)

    def drop(self, sequence: Sequence, event: SequenceEvent) -> None:
        """Have the shard drop a member of the batch; its blocks are freed once it has."""
        self._batch.leave(sequence)
        sequence.advance(event)
        self.pending_frees.add(sequence)

    def end(self, sequence: Sequence, event: SequenceEvent, sound: bool = True) -> None:
        """End a sequence that the shard has dropped by itself: its blocks are freed at once."""
        if not self.pending_frees.discard(sequence):
            self._batch.leave(sequence)
        sequence.advance(event)
        self._memory.release(sequence, sound)
        self._pins.release(sequence)
        del self.living[sequence.id]
        self.ended[sequence.id] = sequence

    def acknowledge(self, number: int) -> None:
        """Free the blocks of the sequences that commands up to `number` have dropped."""
        for sequence in self.pending_frees.acknowledge(number):
            self._memory.release(sequence)
            self._pins.release(sequence)
            sequence.advance(SequenceEvent.ACKNOWLEDGE)
            self._requeue(sequence)

    def lose(self, culprit: Sequence | None) -> int:
        """The shard has died: fail `culprit`, queue its other sequences again; returns how many."""
        self._memory.clear()
        self._batch.clear()
        self.pending_frees.clear()
        self.ended.clear()
        again = 0
        for sequence in list(self.living.values()):
            if sequence.state is SequenceState.WAITING:
                continue
            sequence.forget_blocks()
            self._pins.release(sequence)
            sequence.advance(SequenceEvent.FAIL if sequence is culprit else SequenceEvent.LOSE)
            again += self._requeue(sequence)
        return again

    def _requeue(self, sequence: Sequence) -> bool:
        """Queue a sequence that is off the shard again; returns False if it is finished instead."""
        if sequence.state is SequenceState.FINISHED:
            del self.living[sequence.id]
            return False
        sequence.computed = 0
        self._queue.add(sequence)
        return True

    def check(self) -> None:
        """Raise AssertionError when any invariant of any part is broken."""
        sequences = self.living.values()
        self._queue.check()
        self._batch.check()
        self._memory.check(sequences)
        self.pending_frees.check()
        check_states(sequences, self._queue, self._batch, self.pending_frees)
