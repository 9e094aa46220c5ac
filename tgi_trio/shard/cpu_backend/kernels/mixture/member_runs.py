"""The runs of rows sorted by expert that adapters change.

A row belongs to a token and to one of its experts. Neighbouring rows with the same expert and the
same adapter form a run, as the tokens of a step do (`kernels/adapters.py`). The sites of an
adapter's experts are adjacent, expert by expert; so a run has the address of its adapter's sites,
moved on to its expert. With these runs, the linears of experts are adapted by the same kernels.
"""

from __future__ import annotations

import numpy as np

from tgi_trio.shard.cpu_backend.kernels import kernel
from tgi_trio.shard.cpu_backend.kernels.adapters import MEMBER_RUN_OF, MEMBER_RUNS
from tgi_trio.shard.cpu_backend.kernels.arrays import ints_at
from tgi_trio.shard.cpu_backend.kernels.vectors import load_int, store_int
from tgi_trio.shard.cpu_backend.tables import RUN, SITE, Buffer

GROUPS = int(Buffer.GROUPS)


@kernel
def note_adapter(step, rows, place, token):
    """Keep the address of the adapter of a token, whose row is at `place`, for `list_runs`."""
    run = ints_at(step.runs + load_int(step.run_of + 4 * token) * 8 * RUN, RUN)
    kept = ints_at(step.buffers[MEMBER_RUNS] + 8 * (1 + RUN * rows), rows)
    kept[place] = run[2]


@kernel
def list_runs(step, rows):
    """Write MEMBER_RUNS and MEMBER_RUN_OF, from GROUPS and what `note_adapter` has kept."""
    where, groups = step.buffers[MEMBER_RUNS], step.buffers[GROUPS]
    kept = ints_at(where + 8 * (1 + RUN * rows), rows)
    count = np.int64(0)
    for i in range(1, load_int(groups) + 1):
        expert, first = load_int(groups + 12 * i), load_int(groups + 12 * i + 4)
        for place in range(first, load_int(groups + 12 * i + 8)):
            if place == first or kept[place] != kept[place - 1]:
                run = ints_at(where + 8 * (1 + RUN * count), RUN)
                run[0], run[1], run[2] = place, 0, kept[place]
                if kept[place]:
                    run[2] = kept[place] + expert * 8 * SITE
                count += 1
            run = ints_at(where + 8 * (1 + RUN * (count - 1)), RUN)
            run[1] += 1
            store_int(step.buffers[MEMBER_RUN_OF] + 4 * place, count - 1)
    ints_at(where, 1)[0] = count
