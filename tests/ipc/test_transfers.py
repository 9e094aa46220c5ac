"""Orders to copy arrive as they were sent, in their order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tgi_trio.ipc.frame_codec import Frame
from tgi_trio.ipc.transfers import Transfer, decode_transfers, encode_transfers

NUMBERS = st.integers(0, 2**31 - 1)


@given(st.lists(st.builds(Transfer, NUMBERS, NUMBERS, st.booleans(), st.booleans())))
def test_orders_to_copy(transfers: list[Transfer]) -> None:
    frame = Frame(memoryview(encode_transfers(7, transfers)))
    assert decode_transfers(frame) == transfers
    assert frame.word("command") == 7
