"""A step's rarer columns, split by token and by row."""

from __future__ import annotations

import sys

from hypothesis import given
from hypothesis import strategies as st

from tgi_trio.ipc.messages import StepReport
from tgi_trio.router.scheduling.report_columns import prompt_tops_per_row, tops_per_token

TOPS = st.lists(st.lists(st.tuples(st.integers(0, 99), st.floats(-9, 0)), max_size=4), max_size=6)


@given(rows=st.lists(TOPS, max_size=5))
def test_each_token_has_its_own(rows: list[list[list[tuple[int, float]]]]) -> None:
    every = [top for row in rows for top in row]
    ids, logprobs = [id for top in every for id, _ in top], [p for top in every for _, p in top]
    counts = [len(top) for top in every]
    step = StepReport(1, 1, top_count=counts, top_ids=ids, top_logprobs=logprobs)
    found = tops_per_token(step)
    assert [list(top) for top in found] == every
    assert [len(top) for top in found] == counts
    assert [[top[n] for n in range(len(top))] for top in found] == every
    assert [list(top[1:3]) for top in found] == [top[1:3] for top in every]
    step = StepReport(
        *(1, 1),
        prompt_count=[len(row) for row in rows],
        prompt_top_count=counts,
        prompt_top_ids=ids,
        prompt_top_logprobs=logprobs,
    )
    assert [[list(top) for top in row] for row in prompt_tops_per_row(step)] == rows


def test_pairs_are_not_made_before_somebody_looks() -> None:
    """Those of 64 rows with 1500 each took 6 ms, and another 4 to be freed, in one turn."""
    rows, tops = 64, 500
    count = rows * tops
    step = StepReport(
        *(1, 1),
        top_count=[tops] * rows,
        top_ids=list(range(count)),
        top_logprobs=[-0.5 * n for n in range(count)],
    )
    before = sys.getallocatedblocks()
    found = tops_per_token(step)
    assert sys.getallocatedblocks() - before < 20 * rows
    assert found[1][0] == (500, -250.0)
