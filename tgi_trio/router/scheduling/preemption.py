"""Extends running sequences with blocks, and preempts the youngest ones if there are none.

A sequence is granted more blocks `ask_tokens` before it needs them, the oldest sequence first. If
neither free blocks nor evictable prefixes are left, the youngest member is preempted: its blocks
come back with the acknowledgement, and it is recomputed later from its prompt and its generated
tokens. No sequence is preempted for a younger one. If there is no younger one, a sequence pauses
with its blocks until an older one ends. So the oldest always advances, and every sequence ends.

A sequence of a lower priority counts as younger. It ends all the same: after a while the queue owes
it a turn, and it has their priority from then on.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

from tgi_trio.ipc.messages import ExtendRow
from tgi_trio.router.scheduling.kv_memory import KvMemory
from tgi_trio.router.scheduling.limits import SchedulingLimits
from tgi_trio.router.scheduling.running_batch import RunningBatch
from tgi_trio.router.scheduling.sequence import Sequence

seniority = attrgetter("priority", "order")  # sort key: the oldest first, the youngest last


def extend_blocks(
    batch: RunningBatch, memory: KvMemory, limits: SchedulingLimits
) -> list[ExtendRow]:
    """Grant blocks to members that will soon need them, the oldest first."""
    rows = []
    ahead = limits.grant_tokens
    wishes = [
        (sequence, min(sequence.need, sequence.computed + ahead))
        for sequence in sorted(batch.starving.values(), key=seniority)
    ]
    memory.make_free(sum(memory.count_lacking(sequence, tokens) for sequence, tokens in wishes))
    for sequence, tokens in wishes:
        granted = memory.extend(sequence, tokens)
        if not granted:
            break
        rows.append(ExtendRow(sequence.id, granted))
        batch.watch(sequence)
    return rows


def victims(
    batch: RunningBatch, memory: KvMemory, limits: SchedulingLimits, dropped: Iterable[Sequence]
) -> list[Sequence]:
    """Return the members to preempt so that older ones that lack blocks can go on.

    `dropped`: sequences that are being dropped already, whose blocks will come back.
    """
    needy = sorted(batch.starving.values(), key=seniority)
    coming = memory.available + sum(memory.count_reclaimable(sequence) for sequence in dropped)
    members: list[Sequence] = []  # sorted only once a block is lacking
    chosen: list[Sequence] = []
    for sequence in needy:
        tokens = min(sequence.need, sequence.computed + limits.ask_tokens + 1)
        short = memory.blocks_for(tokens) - len(sequence.blocks)
        if coming < short and not members:
            members = sorted(batch.members.values(), key=seniority)
        while coming < short and seniority(members[-1]) > seniority(sequence):
            victim = members.pop()
            chosen.append(victim)
            coming += memory.count_reclaimable(victim)
        if coming < short:
            break
        coming -= max(0, short)
    return chosen
