"""More blocks for those who run; who gives way when there are none.

A sequence asks for blocks `ask_tokens` before it needs them. The oldest is served first.
What cannot be served from free blocks or evicted prefixes is taken from the youngest member: it
is pushed out, its blocks come back with the acknowledgement, and it is computed again later from
its prompt and the tokens it has. Nobody gives way to someone younger: who finds no one younger
sits steps out, keeping what is computed, until an older one ends. The oldest always advances, so
everyone ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

from tgi_trio.ipc.messages import ExtendRow
from tgi_trio.router.scheduling.kv_memory import KvMemory
from tgi_trio.router.scheduling.limits import SchedulingLimits
from tgi_trio.router.scheduling.running_batch import RunningBatch
from tgi_trio.router.scheduling.sequence import Sequence

seniority = attrgetter("priority", "order")  # the youngest has most of it


def extend_blocks(
    batch: RunningBatch, memory: KvMemory, limits: SchedulingLimits
) -> list[ExtendRow]:
    """Grant blocks to members that near the end of theirs, oldest first."""
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
    """Return the members to push out so that all older ones that starve can go on.

    `dropped` are sequences whose blocks are on their way back.
    """
    needy = sorted(batch.starving.values(), key=seniority)
    coming = memory.available + sum(memory.count_reclaimable(sequence) for sequence in dropped)
    members: list[Sequence] = []  # sorted when the first block lacks
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
