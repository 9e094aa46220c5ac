"""Who goes to the shard next."""

from __future__ import annotations

from tgi_trio.router.scheduling.batch import Batch
from tgi_trio.router.scheduling.limits import SchedulingLimits
from tgi_trio.router.scheduling.memory import KvMemory, Room
from tgi_trio.router.scheduling.queue import WaitingQueue
from tgi_trio.router.scheduling.sequence import Sequence


def admit(
    queue: WaitingQueue, batch: Batch, memory: KvMemory, limits: SchedulingLimits
) -> list[Sequence]:
    """Move sequences from the queue into the batch, in queue order; returns them.

    One whose blocks cannot be had is passed by later ones that fit, `skip_limit` times at most;
    then all wait for it. So a large request neither blocks small ones for ever nor starves.
    """
    admitted: list[Sequence] = []
    passed: list[Sequence] = []
    while len(passed) < len(queue) and batch.has_room:
        sequence = queue.at(len(passed))
        room = _grant(sequence, batch, memory, limits)
        if room is Room.GRANTED:
            queue.remove(sequence)
            batch.enter(sequence)
            admitted.append(sequence)
            for other in passed:
                other.skipped += other.short_at >= 0  # who waits for a prefix waits by choice
        else:
            passed.append(sequence)
        if len(passed) > limits.skip_limit or _has_waited_enough(passed, limits):
            break
    return admitted


def _grant(sequence: Sequence, batch: Batch, memory: KvMemory, limits: SchedulingLimits) -> Room:
    if limits.reserve:
        tokens, headroom = sequence.need, 0
    else:
        # Growth went first: when a member still lacks a block, none is available here.
        tokens = min(sequence.need, sequence.length + limits.grant_tokens)
        headroom = len(batch)
    if memory.available - headroom <= sequence.short_at:
        return Room.SHORT  # as before: not worth a look
    room = memory.admit(sequence, tokens, headroom)
    sequence.short_at = memory.available - headroom if room is Room.SHORT else -1
    return room


def _has_waited_enough(passed: list[Sequence], limits: SchedulingLimits) -> bool:
    return any(sequence.skipped >= limits.skip_limit for sequence in passed)
