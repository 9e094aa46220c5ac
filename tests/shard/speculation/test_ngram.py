"""Drafts: what followed the last tokens when they were met before."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.shard.torch_backend.models_support import plan, sequence
from tgi_trio.shard.contract import Choices
from tgi_trio.shard.runner import DraftRow
from tgi_trio.shard.speculation.hidden import LastStep
from tgi_trio.shard.speculation.ngram import FollowingNgrams, NgramDrafter
from tgi_trio.shard.speculation.record import LONGEST_REST

EOS = 2


def drafts(ids: list[int], most: int = 4, room: int = 100, **sampling: object) -> list[int]:
    row = sequence(1, ids, [1], new=50, **sampling)
    before = row.token_ids[: row.length].tolist()
    count = NgramDrafter(most, [EOS]).draft(row, room)
    assert row.token_ids[: row.length].tolist() == before and row.length == len(ids)
    return row.token_ids[row.length : row.length + count].tolist()


def test_what_followed_the_last_tokens_is_drafted_again() -> None:
    assert drafts([5, 6, 7, 8, 9, 30, 31, 5, 6]) == [7, 8, 9, 30]


def test_nothing_is_drafted_after_tokens_that_are_new() -> None:
    assert drafts([5, 6, 7, 8, 9]) == []
    assert drafts([5]) == []
    assert drafts([5, 6, 7, 6]) == []  # a single token says too little


def test_the_longest_match_wins_and_then_the_latest() -> None:
    assert drafts([1, 5, 6, 40, 9, 5, 6, 41, 1, 5, 6], most=1) == [40]
    assert drafts([5, 6, 40, 9, 5, 6, 41, 8, 5, 6], most=1) == [41]


def test_a_short_period_goes_on() -> None:
    assert drafts([8, 9, 8, 9, 8, 9], most=5) == [8, 9, 8, 9, 8]
    assert drafts([7, 7, 7], most=3) == [7, 7, 7]


def test_no_more_than_there_is_room_for() -> None:
    assert drafts([5, 6, 7, 8, 9, 5, 6], room=2) == [7, 8]
    assert drafts([5, 6, 7, 8, 9, 5, 6], room=0) == []
    full = sequence(1, [5, 6, 7, 5, 6], [1], new=1)  # a buffer with one place left
    assert NgramDrafter(4, [EOS]).draft(full, 100) == 1


def test_the_end_is_never_drafted_unless_it_is_ignored() -> None:
    assert drafts([5, 6, 7, EOS, 9, 5, 6]) == [7]
    assert drafts([5, 6, 7, EOS, 9, 5, 6], ignore_eos=True) == [7, EOS, 9, 5]


def test_a_sequence_whose_drafts_were_wrong_gets_fewer_until_they_are_right() -> None:
    drafter = NgramDrafter(4, [EOS])
    row = sequence(1, [5, 5, 6, 6, 5, 5, 6, 6, 5], [1], new=400)  # after any two something is known

    def after(right: int) -> int:
        """Draft; say the `right` first of the drafts and a token that was not drafted."""
        count = drafter.draft(row, 100)
        place = row.length + right
        row.token_ids[place] = 11 - row.token_ids[place] if right < count else 5
        row.length = place + 1
        return count

    assert [after(0), after(0)] == [4, 1]
    assert [after(0), after(0)] == [0, 0]  # it rests
    assert [after(1), after(2), after(4), after(3)] == [1, 2, 4, 4]
    assert [after(0), after(1)] == [4, 1]  # one failure is none in a row
    assert [after(0) for _ in range(200)].count(0) > 180
    assert 1 in [after(0) for _ in range(LONGEST_REST + 1)]  # it never gives up for good


def test_drafts_are_judged_by_the_tokens_in_their_place() -> None:
    """Also when steps without drafts lie between: many tokens came, none was drafted right."""
    drafter = NgramDrafter(4, [EOS])
    row = sequence(1, [5, 6, 7, 8, 9, 5, 6], [1], new=50)
    assert drafter.trust(row) == 4
    assert drafter.draft(row, 2) == 2
    row.token_ids[row.length : row.length + 3] = [30, 8, 31]
    row.length += 3
    assert drafter.trust(row) == 1
    row.length += 1
    row.token_ids[row.length - 4 : row.length] = [8, 9, 5, 6]
    assert drafter.draft(row, 2) == 1
    row.token_ids[row.length] += 1
    row.length += 1
    assert drafter.trust(row) == 0  # it rests


@given(
    st.lists(st.integers(3, 5), min_size=1, max_size=60),
    st.lists(st.integers(1, 9), min_size=1, max_size=20),
)
def test_an_index_that_grew_with_its_sequence_is_that_of_the_whole(
    ids: list[int], growth: list[int]
) -> None:
    drafter = NgramDrafter(4, [EOS])
    row = sequence(1, ids, [1], new=8)
    row.length = 0
    for count in growth:
        row.length = min(len(ids), row.length + count)
        if "drafts" in row.state:
            record: Any = row.state["drafts"]
            record.drafts = []  # none that could have been wrong
        got = drafter.draft(row, 100)
        drafted = row.token_ids[row.length : row.length + got].copy()
        row.token_ids[: len(ids)] = ids  # as if every draft had been wrong
        expected = drafts(ids[: row.length])
        # Both buffers may differ in room, so compare what both had room for.
        assert np.array_equal(drafted, expected[:got])
        assert bool(got) == bool(expected)


def test_places_are_for_those_whose_text_is_said_again() -> None:
    """As far as is known when a step is planned whose drafts the runner makes."""
    last = LastStep()
    drafter = FollowingNgrams(3, [EOS], last)
    rows = [sequence(i, [5, 6, 7, 8, 5, 6], [1], new=20) for i in range(3)]
    asking = [DraftRow(i, row, 10) for i, row in enumerate(rows)]
    assert drafter.follow(asking, 20) == {}
    assert drafter.draft(rows[0], 2) == 2  # by the host, in the step that is under way
    assert drafter.follow(asking, 20) == {0: 3}
    drafter.judge(rows[0], 2, 1)
    assert drafter.follow(asking, 20) == {}

    for row in rows:
        row.computed = row.length - 1
    behind = np.array([[7, 8, -1], [-1, -1, -1], [7, -1, -1]])
    read, every, ones = plan(rows, [1, 1, 1]), np.arange(3), np.ones(3, np.int64)
    last.keep_drafts(read, every, Choices(ones, 7 * ones, np.full(3, -1.0)), behind)
    assert drafter.follow(asking, 20) == {}  # it is of tokens that they do not know yet
    for row in rows:
        row.token_ids[row.length], row.length = 7, row.length + 1
    assert drafter.follow(asking, 20) == {0: 2, 2: 3}  # one of its drafts was right, so two
    assert drafter.follow(asking, 3) == {0: 1, 2: 2}
    drafter.judge(rows[2], 1, 0)
    drafter.judge(rows[2], 1, 0)
    assert [drafter.follow(asking, 20) for _ in range(3)] == [{0: 2}, {0: 2}, {0: 2, 2: 1}]
    for _ in range(5):
        assert drafter.follow(asking, 20).keys() == {0, 2}  # what comes next may be there, too
        for row in rows:
            row.length += 1
    assert drafter.follow(asking, 20) == {}
