"""Clients get whole events without ids; what is kept is what they have got."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tgi_trio.cluster.event_cutter import BadStream, EventCutter

STREAM = (
    b'data: {"role":"assistant"}\n\n'
    b':i 0:17,4\ndata: {"text":"a :i 0:9"}\n\n'
    b":\n\n"
    b':i 1:5\nevent: delta\ndata: {"text":"b"}\n\n'
    b':i 0:8!\ndata: {"text":"c"}\n\n'
    b":i 1:6;2:7\n\n"
    b"data: [DONE]\n\n"
)
SEEN = (
    b'data: {"role":"assistant"}\n\n'
    b'data: {"text":"a :i 0:9"}\n\n'
    b":\n\n"
    b'event: delta\ndata: {"text":"b"}\n\n'
    b'data: {"text":"c"}\n\n'
    b"data: [DONE]\n\n"
)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, len(STREAM)), max_size=6))
def test_where_bytes_are_cut_makes_no_difference(cuts: list[int]) -> None:
    cutter = EventCutter(longest_event=1000)
    places = [0, *sorted(cuts), len(STREAM)]
    seen = b""
    for start, end in pairwise(places):
        seen += cutter.cut(STREAM[start:end])
    assert seen == SEEN
    assert cutter.emitted == b"0:17,4,8!;1:5,6;2:7"


def test_ids_of_half_an_event_are_not_kept() -> None:
    cutter = EventCutter(longest_event=1000)
    assert cutter.cut(b":i 0:1\ndata: a\n\n:i 0:2\ndata: b\n") == b"data: a\n\n"
    assert cutter.emitted == b"0:1"
    cutter.start_again()
    assert cutter.cut(b":i 0:2\ndata: b\n\n") == b"data: b\n\n"
    assert cutter.emitted == b"0:1,2"


def test_a_stream_without_ids_passes_as_it_is() -> None:
    cutter = EventCutter(longest_event=1000)
    assert cutter.cut(b"data: a\n\ndata: b\n\n") == b"data: a\n\ndata: b\n\n"
    assert cutter.emitted == b""


@pytest.mark.parametrize("line", [b"0", b":1", b"x:1", b"0:1,y", b"0:-1", b"0 1"])
def test_ids_that_cannot_be_read_are_told(line: bytes) -> None:
    with pytest.raises(BadStream, match="ids that cannot be read"):
        EventCutter(longest_event=1000).cut(b":i %b\ndata: a\n\n" % line)


def test_an_event_without_an_end_is_refused() -> None:
    with pytest.raises(BadStream, match="more than 10 bytes"):
        EventCutter(longest_event=10).cut(b"data: " + b"x" * 20)
