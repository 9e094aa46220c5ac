"""Ten faults of `tests.stress.chaos`, every kind among them: nothing is wrong afterwards."""

from __future__ import annotations

import pytest

from tests.stress.chaos import run
from tests.stress.chaos_faults import FAULTS

pytestmark = pytest.mark.system


def test_ten_faults_under_load_leave_the_books_balanced() -> None:
    report = run(10, seed=2, clients=6)
    assert report.problems == {}
    assert set(report.faults) == {fault.__name__ for fault in FAULTS}
    assert report.accepted == sum(report.ended.values()) > report.finished > 10
    assert report.ended["failed"] == 0
    assert report.restarts >= 2
