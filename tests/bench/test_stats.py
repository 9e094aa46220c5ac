"""What a benchmark has found is printed and written, however it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.harness import stats


def test_results_are_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[dict[str, Any]] = []
    path = tmp_path / "new" / "out.json"
    with stats.reporting(path, "name", lambda: (stats.table_of(rows), {"rows": rows})):
        rows.append({"what": "first", "ms": 1.5})
    written = json.loads(path.read_text())
    assert (written["schema"], written["bench"]) == (1, "name")
    assert written["rows"] == [{"what": "first", "ms": 1.5}]
    assert "failed" not in written
    assert "| first | 1.5 |" in capsys.readouterr().out


@pytest.mark.parametrize("error", [ValueError("the second part"), KeyboardInterrupt()])
def test_what_was_measured_before_a_failure_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: BaseException
) -> None:
    rows: list[dict[str, Any]] = []
    path = tmp_path / "out.json"
    with (
        pytest.raises(type(error)),
        stats.reporting(path, "name", lambda: (stats.table_of(rows), {"rows": rows})),
    ):
        rows.append({"what": "first", "ms": 1.5})
        raise error
    written = json.loads(path.read_text())
    assert written["rows"] == [{"what": "first", "ms": 1.5}]
    assert written["failed"] == f"{type(error).__name__}: {error}"
    printed = capsys.readouterr().out
    assert "| first | 1.5 |" in printed and f"failed: {type(error).__name__}" in printed


def test_a_report_that_cannot_be_made_does_not_hide_the_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def found() -> tuple[str, dict[str, Any]]:
        raise IndexError("no rows")

    with pytest.raises(ValueError, match="the first part"):
        with stats.reporting(tmp_path / "out.json", "name", found):
            raise ValueError("the first part")
    assert "nothing can be shown of what was measured" in capsys.readouterr().err
    with pytest.raises(IndexError), stats.reporting(None, "name", found):
        pass


def test_without_rows_the_table_says_so() -> None:
    assert stats.table_of([]) == "nothing was measured"
