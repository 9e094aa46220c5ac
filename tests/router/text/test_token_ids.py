"""Lists of ids become arrays, and are emptied on the way if nobody wants them any more."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from tgi_trio.router.text.token_ids import PIECE, copy_ids, drain_ids

COUNTS = (0, 3, PIECE, 2 * PIECE + 1)


@pytest.mark.parametrize("count", COUNTS)
def test_copies_share_nothing_with_what_they_are_copied_from(count: int) -> None:
    given = np.arange(count, dtype=np.int32)
    for ids in (given, given.tolist()):
        copy = copy_ids(ids)
        assert copy.dtype == np.int32 and copy.tolist() == given.tolist()
        assert not np.shares_memory(copy, given) and len(ids) == count


@pytest.mark.parametrize("count", COUNTS)
def test_a_drained_list_is_empty_and_its_array_refers_to_nothing(count: int) -> None:
    ids = list(range(1000, 1000 + count))
    copy = drain_ids(ids)
    assert ids == [] and copy.tolist() == list(range(1000, 1000 + count))
    assert gc.get_referents(copy) == [] and not gc.is_tracked(copy)


@pytest.mark.parametrize("wrong", [2**31, "x"])
def test_what_are_no_ids_stay_where_they_are(wrong: object) -> None:
    given: list[object] = [*range(PIECE), wrong]
    with pytest.raises((OverflowError, ValueError)):
        drain_ids(given)  # type: ignore[arg-type]
    assert given == [*range(PIECE), wrong]
