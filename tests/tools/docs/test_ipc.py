"""docs/ipc.md draws the control page from its table."""

from __future__ import annotations

import pytest

from tgi_trio.ipc import layout
from tools.docs import ipc


def test_a_changed_table_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    extra = layout.Field("new_word", 9 * layout.LINE, 8, "router", "something new")
    before = layout.layout_id()
    monkeypatch.setattr(layout, "FIELDS", (*layout.FIELDS, extra))
    assert "new_word" in ipc.picture() and "new_word" in ipc.fields()
    assert layout.layout_id() != before, "another layout is another protocol"
