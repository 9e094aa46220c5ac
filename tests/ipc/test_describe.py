"""docs/ipc.md says what the code does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tgi_trio.ipc import layout
from tgi_trio.ipc.describe import refresh

DOCUMENT = Path(__file__).parents[2] / "docs" / "ipc.md"


def test_the_document_is_up_to_date() -> None:
    text = DOCUMENT.read_text()
    assert refresh(text) == text, "run: python -m tgi_trio.ipc.describe --write"


def test_a_changed_table_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    extra = layout.Field("new_word", 9 * layout.LINE, 8, "router", "something new")
    before = layout.layout_id()
    monkeypatch.setattr(layout, "FIELDS", (*layout.FIELDS, extra))
    assert "new_word" in refresh(DOCUMENT.read_text())
    assert layout.layout_id() != before, "another layout is another protocol"


def test_a_lost_marker_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 blocks"):
        refresh("nothing here")


def test_no_two_fields_overlap_and_writers_do_not_share_lines() -> None:
    taken: set[int] = set()
    for field in layout.FIELDS:
        span = set(range(field.offset, field.offset + field.size))
        assert not taken & span, field.name
        assert field.offset % 8 == 0
        assert max(span) < layout.CONTROL_BYTES
        taken |= span
    lines: dict[int, set[str]] = {}
    for field in layout.FIELDS:
        lines.setdefault(field.offset // layout.LINE, set()).add(field.writer)
    assert all(len(writers) == 1 for writers in lines.values())
