"""Clients get whole events without ids; what is kept is what they have got."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tgi_trio.cluster.event_cutter import BadStream, EventCutter
from tgi_trio.cluster.relay import MOST_HELD

STREAM = (
    b'data: {"role":"assistant"}\n\n'
    b':i 0:17,4\ndata: {"text":"a :i 0:9"}\n\n'
    b":\n\n"
    b'event: delta\ndata: {"text":"b"}\n\n'
    b':i 1:5\nevent: done\ndata: {"text":"b"}\n\n'
    b':i 0:8!\ndata: {"text":"c"}\n\n'
    b":i 1:6!\n\n"
    b'data: {"usage":1}\n\n'
    b":i 0:!\ndata: [DONE]\n\n"
)
SEEN = (
    b'data: {"role":"assistant"}\n\n'
    b'data: {"text":"a :i 0:9"}\n\n'
    b":\n\n"
    b'event: delta\ndata: {"text":"b"}\n\n'
    b'event: done\ndata: {"text":"b"}\n\n'
    b'data: {"text":"c"}\n\n'
    b'data: {"usage":1}\n\n'
    b"data: [DONE]\n\n"
)


def cutter(told: bool = True) -> EventCutter:
    return EventCutter(longest=1000, has_ids=told)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, len(STREAM)), max_size=6))
def test_where_bytes_are_cut_makes_no_difference(cuts: list[int]) -> None:
    cut = cutter()
    seen = b""
    for start, end in pairwise([0, *sorted(cuts), len(STREAM)]):
        seen += cut.cut(STREAM[start:end])
    assert seen == SEEN
    assert cut.emitted == b"0:17,4,8!;1:5,6!"
    assert cut.finish() == b""


def test_an_event_at_a_time_is_as_good_as_all_at_once() -> None:
    cut = cutter()
    assert [cut.cut(each + b"\n\n") for each in STREAM.split(b"\n\n")[:-1]] == [
        *(b"", b'data: {"role":"assistant"}\n\ndata: {"text":"a :i 0:9"}\n\n', b":\n\n", b""),
        b'event: delta\ndata: {"text":"b"}\n\nevent: done\ndata: {"text":"b"}\n\n',
        *(b'data: {"text":"c"}\n\n', b"", b"", b'data: {"usage":1}\n\ndata: [DONE]\n\n'),
    ]
    assert cut.emitted == b"0:17,4,8!;1:5,6!"


def test_ids_of_half_an_event_are_not_kept() -> None:
    cut = cutter()
    assert cut.cut(b":i 0:1\ndata: a\n\n:i 0:2\ndata: b\n") == b"data: a\n\n"
    assert cut.emitted == b"0:1"
    cut.start_again()
    assert cut.cut(b":i 0:2\ndata: b\n\n") == b"data: b\n\n"
    assert cut.emitted == b"0:1,2"


def test_events_without_a_line_wait_for_one() -> None:
    """A token may bring several events: a client has all of them or none."""
    cut = cutter()
    assert cut.cut(b"data: a\n\ndata: b\n\n") == b""
    cut.start_again()  # the replica is lost
    assert cut.cut(b"data: a\n\n") == b""
    assert cut.cut(b":i 0:1\ndata: b\n\n") == b"data: a\n\ndata: b\n\n"


def test_what_waits_leaves_at_the_end() -> None:
    cut = cutter()
    assert cut.cut(b"data: a\n\n") == b""
    assert cut.finish() == b"data: a\n\n"


def test_nobody_waits_for_replicas_that_do_not_tell() -> None:
    cut = cutter(told=False)
    assert cut.cut(b"data: a\n\ndata: b\n\ndata:") == b"data: a\n\ndata: b\n\n"
    assert cut.emitted == b""


@pytest.mark.parametrize("line", [b"0", b":1", b"x:1", b"0:1,y", b"0:-1", b"0 1"])
def test_ids_that_cannot_be_read_are_told(line: bytes) -> None:
    with pytest.raises(BadStream, match="ids that cannot be read"):
        cutter().cut(b":i %b\ndata: a\n\n" % line)


@pytest.mark.parametrize("data", [b"data: " + b"x" * 1000, b"data: 0123456789\n\n" * 60])
def test_what_waits_is_bounded(data: bytes) -> None:
    with pytest.raises(BadStream, match="more than 1000 bytes"):
        cutter().cut(data)


def test_the_last_events_of_a_long_answer_pass() -> None:
    """Those of /v1/responses: 4,000 tokens with 20 alternatives, four times, and then their ids."""
    event = b"data: %b\n\n" % (b"x" * 5_000_000)
    stream = event * 3 + b":i 0:1!\n" + event
    cut = EventCutter(MOST_HELD, has_ids=True)
    parts = range(0, len(stream), 1 << 16)
    assert b"".join(cut.cut(stream[at : at + (1 << 16)]) for at in parts) == event * 4
