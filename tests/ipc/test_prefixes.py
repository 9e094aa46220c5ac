"""Orders about prefixes arrive as they were sent."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tgi_trio.ipc.frame_codec import Frame
from tgi_trio.ipc.prefixes import (
    KeepOrder,
    PrefixReport,
    RestoreOrder,
    decode_keep,
    decode_prefix_reply,
    decode_restore,
    encode_keep,
    encode_prefix_reply,
    encode_restore,
)

FOLDERS = st.binary(min_size=1).map(lambda name: Path(name.decode("utf-8", "surrogateescape")))
KEYS = st.binary(min_size=16, max_size=16)
PLACES = st.lists(st.integers(0, 2**31 - 1)).map(tuple)
COUNTS = st.integers(0, 2**64 - 1)


@given(st.builds(KeepOrder, FOLDERS, KEYS, PLACES, PLACES))
def test_an_order_to_keep(order: KeepOrder) -> None:
    assert decode_keep(Frame(memoryview(encode_keep(0, order)))) == order


@given(st.builds(RestoreOrder, FOLDERS, KEYS, COUNTS, COUNTS))
def test_an_order_to_restore(order: RestoreOrder) -> None:
    assert decode_restore(Frame(memoryview(encode_restore(0, order)))) == order


@given(st.builds(PrefixReport, COUNTS, st.text(st.characters(codec="utf-8"))))
def test_a_report(report: PrefixReport) -> None:
    assert decode_prefix_reply(Frame(memoryview(encode_prefix_reply(report)))) == report
