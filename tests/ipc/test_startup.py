"""What is said before the first step arrives as it was said, field by field."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tgi_trio.errors import CorruptFrame, ProtocolMismatch
from tgi_trio.ipc.frame_codec import Frame, encode
from tgi_trio.ipc.frames import FRAMES, LAYOUT_HASH, SPECS, VERSION, FrameKind
from tgi_trio.ipc.startup import (
    Hello,
    ShardInfo,
    WarmupRequest,
    WarmupResult,
    decode_hello,
    decode_info,
    decode_warmup,
    decode_warmup_reply,
    encode_hello,
    encode_info,
    encode_warmup,
    encode_warmup_reply,
)

NUMBERS = st.integers(0, 2**64 - 1)
NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Zl", "Zp"]))  # one line
BY_TYPE: dict[str, st.SearchStrategy[Any]] = {
    "int": NUMBERS,
    "bool": st.booleans(),
    "str": NAMES,
    "tuple[int, ...]": st.lists(st.integers(-(2**31), 2**31 - 1)).map(tuple),
}


def anything(record: type[Any], **given: Any) -> st.SearchStrategy[Any]:
    """Every field of a record by its type, so that a new one is drawn as well."""
    drawn = {each.name: BY_TYPE[str(each.type)] for each in fields(record)}
    return st.builds(record, **drawn | {name: st.just(value) for name, value in given.items()})


def frame_of(payload: bytes) -> Frame:
    return Frame(memoryview(payload))


@given(anything(ShardInfo), NUMBERS)
def test_the_router_hears_of_a_model_what_the_shard_says(info: ShardInfo, command: int) -> None:
    frame = frame_of(encode_info(command, info))
    assert frame.kind is FrameKind.INFO_REPLY and frame.word("command") == command
    assert decode_info(frame) == info


INFO = ShardInfo(
    vocab_size=9,
    block_size=16,
    layers=1,
    kv_bytes_per_token=8,
    max_positions=0,
    eos_ids=(2,),
    dtype="float32",
    device="cpu",
    backend="one\ntwo",
    load_ns=0,
)


def test_a_name_is_one_line() -> None:
    assert decode_info(frame_of(encode_info(1, INFO))) == replace(INFO, backend="one two")


def test_an_answer_without_all_its_names_is_corrupt() -> None:
    words = dict.fromkeys((name for name, _ in SPECS[FrameKind.INFO_REPLY].words), 0)
    payload = encode(FrameKind.INFO_REPLY, words, {"names": np.frombuffer(b"cpu", np.uint8)})
    with pytest.raises(CorruptFrame, match="1 names, expected 5"):
        decode_info(frame_of(payload))


@given(anything(WarmupRequest), anything(WarmupResult), NUMBERS)
def test_a_warm_up_is_asked_for_and_answered_in_the_same_words(
    request: WarmupRequest, found: WarmupResult, command: int
) -> None:
    down, up = (
        frame_of(encode_warmup(command, request)),
        frame_of(encode_warmup_reply(command, found)),
    )
    assert (down.kind, up.kind) == (FrameKind.WARMUP, FrameKind.WARMUP_REPLY)
    assert down.word("command") == up.word("command") == command
    assert (decode_warmup(down), decode_warmup_reply(up)) == (request, found)


@given(anything(Hello, version=VERSION, layout_hash=LAYOUT_HASH))
def test_hello_says_who_is_there(hello: Hello) -> None:
    assert decode_hello(frame_of(encode_hello(hello)), "somebody") == hello


@given(anything(Hello))
def test_hello_of_another_wire_is_refused(hello: Hello) -> None:
    """Both numbers are drawn from 2**64: equal ones do not come up by chance."""
    with pytest.raises(ProtocolMismatch, match=rf"somebody.*layout {hello.layout_hash:016x}"):
        decode_hello(frame_of(encode_hello(hello)), "somebody")


def test_a_first_frame_that_is_no_hello_is_refused() -> None:
    with pytest.raises(ProtocolMismatch, match="its first frame is INFO, not HELLO"):
        decode_hello(frame_of(encode(FrameKind.INFO, {"command": 0}, {})), "somebody")


def test_no_field_of_a_record_is_left_out_of_its_frame() -> None:
    """And no word of the frame is without a field, but for the command's number."""
    texts = {"dtype", "device", "backend", "device_name", "undivided"}  # lines of one column
    rows = {
        FrameKind.HELLO: Hello,
        FrameKind.INFO_REPLY: ShardInfo,
        FrameKind.WARMUP: WarmupRequest,
        FrameKind.WARMUP_REPLY: WarmupResult,
    }
    for kind, record in rows.items():
        spec = SPECS[kind]
        assert spec in FRAMES
        told = {name for name, _ in spec.words} | {column.name for column in spec.columns}
        names = {each.name for each in fields(record)}
        assert names - texts == told - {"command", "names"}
