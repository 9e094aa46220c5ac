"""The control page: every field has a place and a cache line of its writer's own."""

from __future__ import annotations

from tgi_trio.ipc import layout


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
