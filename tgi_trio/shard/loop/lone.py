"""Plans the step of a batch of one row, which decodes. No torch in this file.

The array operations of the general plan would take longer for it than a small model's head.
"""

from __future__ import annotations

import numpy as np

from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.loop.row_table import UNKNOWN, RowTable


def decodes_alone(table: RowTable) -> bool:
    """Return whether a table has one row, whose next step computes its last token alone.

    False for the end of a prompt, and where images change positions.
    """
    if len(table.sequences) != 1 or table.shaped or table.held[0] or table.last[0] == UNKNOWN:
        return False
    computed = table.computed[0]
    return bool(
        table.given[0] <= computed == table.length[0] - 1
        and computed < table.granted[0]
        and table.remaining[0] > 0
    )


def plan_alone(table: RowTable, drafts: int) -> StepPlan:
    """Return the step of a row that `decodes_alone`: its last token, then `drafts` drafts."""
    sequence, first, size = table.sequences[0], int(table.computed[0]), table.block_size
    end = first + 1 + drafts
    positions = np.arange(first, end)
    blocks = table.blocks[:1, : -(-end // size)].copy()
    places, offsets = np.divmod(positions, size)
    reads = writes = None
    if sequence.states is not None:
        reads, writes = table.state_slots(np.zeros(1, np.int64), np.array((end,)))
    return StepPlan(
        rows=[sequence],
        token_ids=sequence.token_ids[first:end].astype(np.int64),
        positions=positions,
        kv_slots=blocks[0].astype(np.int64)[places] * size + offsets,
        query_starts=np.array((0, end - first), np.int32),
        context_lengths=np.array((end,), np.int32),
        block_tables=blocks,
        samples=np.ones(1, np.bool_),
        drafts=np.array((drafts,), np.int32) if drafts else None,
        prefills=np.zeros(1, np.bool_),
        state_reads=reads,
        state_writes=writes,
        places=np.zeros(1, np.int64),
        taken=np.ones(1, np.int64),
        moment=table.moment,
    )
