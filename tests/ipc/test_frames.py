"""The wire: golden bytes, round trips, and frames from a peer that lies."""

from __future__ import annotations

import dataclasses
import os
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tgi_trio.errors import CorruptFrame
from tgi_trio.ipc.frame_codec import Frame, encode
from tgi_trio.ipc.frames import FRAMES, LAYOUT_HASH, SPECS, Finish, FrameKind
from tgi_trio.ipc.images import ArenaPlace, SequenceImage
from tgi_trio.ipc.messages import (
    ExtendRow,
    Fault,
    PrefillRow,
    SamplingParameters,
    StateGrant,
    StepReport,
    decode_extend,
    decode_faults,
    decode_prefill,
    decode_step,
    encode_extend,
    encode_faults,
    encode_filter,
    encode_prefill,
)

# Changing the table changes the protocol: raise VERSION, then write the new hash here.
GOLDEN_HASH = 0xF2AC59F7D789720F


def frame(data: bytes) -> Frame:
    return Frame(memoryview(data))


def step_words(**given: int) -> dict[str, int]:
    return {name: 0 for name, _ in SPECS[FrameKind.STEP].words} | given


def test_the_layout_is_the_one_this_test_was_written_for() -> None:
    assert hex(LAYOUT_HASH) == hex(GOLDEN_HASH)


def test_golden_bytes_of_a_filter() -> None:
    wanted = struct.pack("<3Q", FrameKind.FILTER, 7, 2) + struct.pack("<2Q", 11, 12)
    assert encode_filter(7, [11, 12]) == wanted


def test_golden_bytes_of_an_extend_with_padding() -> None:
    wanted = struct.pack("<4Q", FrameKind.EXTEND, 3, 1, 3) + struct.pack("<Q", 9)
    wanted += struct.pack("<I", 3) + bytes(4) + struct.pack("<3i", 5, 6, 7) + bytes(4)
    assert encode_extend(3, [ExtendRow(9, [5, 6, 7])]) == wanted


def test_every_frame_round_trips_empty() -> None:
    for spec in FRAMES:
        words = {name: i + 1 for i, (name, _) in enumerate(spec.words)}
        got = frame(encode(spec.kind, words, {}))
        assert got.kind is spec.kind
        assert {name: got.word(name) for name, _ in spec.words} == words
        assert all(got.word(count) == 0 for count in spec.counts)


def test_a_report_has_the_words_and_columns_of_a_step_in_their_order() -> None:
    """It is made of them by place."""
    step = SPECS[FrameKind.STEP]
    names = [name for name, _ in step.words] + [column.name for column in step.columns]
    assert [field.name for field in dataclasses.fields(StepReport)] == names
    words = {name: i + 1 for i, (name, _) in enumerate(step.words)}
    report = decode_step(frame(encode(FrameKind.STEP, words, step_columns())))
    empty: dict[str, list[int]] = {column.name: [] for column in step.columns}
    columns = {name: array.tolist() for name, array in step_columns().items()}
    assert dataclasses.asdict(report) == words | empty | columns


def test_columns_without_items_are_lists_of_their_own() -> None:
    """Whoever has a report may add to one of them."""
    lists = frame(encode(FrameKind.STEP, step_words(), {})).lists()
    assert lists == [[] for _ in SPECS[FrameKind.STEP].columns]
    assert len({id(each) for each in lists}) == len(lists)


@given(st.lists(st.integers(0, 2**64 - 1), max_size=9), st.lists(st.integers(0, 9), max_size=9))
def test_a_step_round_trips(sequences: list[int], counts: list[int]) -> None:
    rows = min(len(sequences), len(counts))
    sequences, counts = sequences[:rows], counts[:rows]
    tokens = sum(counts)
    columns: dict[str, NDArray[Any]] = {
        "sequence": np.array(sequences, np.uint64),
        "computed": np.arange(rows, dtype=np.uint32),
        "token_count": np.array(counts, np.uint32),
        "prompt_count": np.zeros(rows, np.uint32),
        "finish": np.full(rows, Finish.EOS, np.uint32),
        "token_ids": np.arange(tokens, dtype=np.int32),
        "logprobs": np.linspace(-3, 0, tokens, dtype=np.float32),
        "top_count": np.zeros(tokens, np.uint32),
    }
    report = decode_step(frame(encode(FrameKind.STEP, step_words(step=4, acknowledged=9), columns)))
    assert (report.step, report.acknowledged) == (4, 9)
    assert (report.sequence, report.token_count) == (sequences, counts)
    assert report.token_ids == list(range(tokens))
    assert report.logprobs == columns["logprobs"].tolist()
    assert report.finish == [Finish.EOS] * rows


PARAMETERS = st.builds(
    SamplingParameters,
    seed=st.integers(0, 2**64 - 1),
    sample=st.booleans(),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.integers(0, 100),
    ignore_eos=st.booleans(),
    watermark=st.booleans(),
    absolute_penalties=st.booleans(),
    prompt_logprobs=st.booleans(),
    prompt_top_n=st.integers(0, 20),
    logit_bias=st.lists(
        st.tuples(st.integers(0, 999), st.sampled_from([-1.0, 0.5])), max_size=3
    ).map(tuple),
    grammar=st.text(max_size=5),
    no_repeat_size=st.integers(0, 99),
    no_repeat_window=st.integers(0, 2**31 - 1),
    no_repeat_spared=st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
    gap_ends=st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
    ends=st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
    tokenizer=st.sampled_from(["", "/a/tokenizer.json", "/\udcff/é"]),  # any name of a file
)
U4, U8 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
IMAGES = st.builds(
    SequenceImage,
    first=U4,
    tokens=U4,
    runs=st.lists(st.tuples(U4, U4), max_size=3).map(tuple),
    key=st.binary(min_size=32, max_size=32),
    place=st.builds(ArenaPlace, offset=U8, nbytes=U8),
)
ROWS = st.builds(
    PrefillRow,
    sequence=st.integers(0, 2**64 - 1),
    token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=5).map(lambda x: np.array(x, np.int32)),
    prompt_length=st.integers(0, 5),
    cached_length=st.integers(0, 5),
    block_ids=st.lists(st.integers(1, 2**31 - 1), max_size=4),
    max_new_tokens=st.integers(0, 2**32 - 1),
    min_new_tokens=st.integers(0, 9),
    sampling=PARAMETERS,
    images=st.lists(IMAGES, max_size=2).map(tuple),
)


@given(st.lists(ROWS, max_size=4))
def test_a_prefill_round_trips(rows: list[PrefillRow]) -> None:
    got = decode_prefill(frame(encode_prefill(5, rows)))
    assert [r.token_ids.tolist() for r in got] == [r.token_ids.tolist() for r in rows]
    names = [name for name in PrefillRow.__dataclass_fields__ if name != "token_ids"]
    for name in names:
        assert [getattr(r, name) for r in got] == [getattr(r, name) for r in rows]


def test_images_of_no_row_are_refused() -> None:
    image = SequenceImage(1, 2, ((0, 1),), bytes(32), ArenaPlace(0, 64))
    row = PrefillRow(1, np.zeros(1, np.int32), 1, 0, [], 1, images=(image,))
    whole = bytearray(encode_prefill(5, [row]))
    for name, wrong in (("image_row", 7), ("image_run_count", 2)):
        changed = frame(bytes(whole))
        column = changed.column(name)
        altered = np.array([wrong], column.dtype).tobytes()
        lied = memoryview(bytearray(whole))
        at = column.ctypes.data - changed.column("sequence").ctypes.data
        first = SPECS[FrameKind.PREFILL].header_bytes
        lied[first + at : first + at + len(altered)] = altered
        with pytest.raises(CorruptFrame, match="1 images do not fit"):
            decode_prefill(Frame(lied))


def test_slots_for_states_round_trip() -> None:
    ids = np.arange(9, dtype=np.int32)
    grants = [
        StateGrant((3, 4)),
        None,
        StateGrant((5, 6), source=2, held_length=8, saves=((4, 7), (8, 1))),
    ]
    rows = [PrefillRow(i, ids, 9, 0, [1], 1, states=own) for i, own in enumerate(grants)]
    got = decode_prefill(frame(encode_prefill(5, rows)))
    assert [row.states for row in got] == grants


def test_faults_and_extends_round_trip() -> None:
    faults = [Fault(3, "schlägt fehl"), Fault(4, "")]
    assert decode_faults(frame(encode_faults(8, faults))) == faults
    rows = [ExtendRow(1, [2, 3]), ExtendRow(4, [])]
    assert decode_extend(frame(encode_extend(1, rows))) == rows


def test_a_column_with_gaps_or_of_another_type_is_written_as_the_table_says() -> None:
    gapped = np.arange(20, dtype=np.uint64)[::2]
    plain = encode(FrameKind.FILTER, {"command": 1}, {"sequence": gapped.copy()})
    assert encode(FrameKind.FILTER, {"command": 1}, {"sequence": gapped}) == plain
    assert encode(FrameKind.FILTER, {"command": 1}, {"sequence": gapped.astype(np.int16)}) == plain


def test_columns_that_do_not_belong_together_are_refused() -> None:
    two, three = np.zeros(2, np.uint64), np.zeros(3, np.uint32)
    with pytest.raises(ValueError, match="block_count: 3 items, expected 2"):
        encode(FrameKind.EXTEND, {"command": 1}, {"sequence": two, "block_count": three})
    with pytest.raises(ValueError, match="no column"):
        encode(FrameKind.FILTER, {"command": 1}, {"sequence": two, "nonsense": two})
    with pytest.raises(KeyError):
        encode(FrameKind.FILTER, {}, {"sequence": two})


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 16, 23, 32, 39])
def test_a_frame_cut_short_is_corrupt(size: int) -> None:
    whole = encode_filter(7, [11, 12])
    assert len(whole) == 40
    with pytest.raises(CorruptFrame):
        frame(whole[:size])


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_a_frame_or_corrupt_and_nothing_else(data: bytes) -> None:
    try:
        got = frame(data)
    except CorruptFrame:
        return
    for name, _, _ in got.spec.plan:
        got.column(name).tolist()


@pytest.mark.parametrize("count", [0, 1, 3, 2**32, 2**63, 2**64 - 1])
def test_a_count_that_lies_is_corrupt(count: int) -> None:
    words = list(struct.unpack("<5Q", encode_filter(7, [11, 12])))
    words[2] = count
    with pytest.raises(CorruptFrame):
        frame(struct.pack("<5Q", *words))


def step_columns() -> dict[str, NDArray[Any]]:
    """Return the columns of two rows, the second of which has two tokens and three prompt ones."""
    return {
        "sequence": np.array([1, 2], np.uint64),
        "computed": np.array([4, 5]),
        "token_count": np.array([1, 2]),
        "prompt_count": np.array([0, 3]),
        "finish": np.array([Finish.EOS, Finish.NONE]),
        "token_ids": np.array([7, 8, 9]),
        "logprobs": np.zeros(3),
        "top_count": np.array([0, 2, 0]),
        "top_ids": np.array([5, 6]),
        "top_logprobs": np.zeros(2),
        "prompt_logprobs": np.zeros(3),
        "prompt_top_count": np.array([0, 1, 0]),
        "prompt_top_ids": np.array([4]),
        "prompt_top_logprobs": np.zeros(1),
    }


def test_counts_within_columns_that_do_not_add_up_are_corrupt() -> None:
    columns: dict[str, NDArray[Any]] = {
        "sequence": np.array([1], np.uint64),
        "block_count": np.array([5], np.uint32),
        "block_ids": np.array([1, 2], np.int32),
    }
    with pytest.raises(CorruptFrame, match="EXTEND: block_count says 5 items, and 2 are there"):
        decode_extend(frame(encode(FrameKind.EXTEND, {"command": 1}, columns)))
    columns = {
        "sequence": np.array([1], np.uint64),
        "message_length": np.array([5], np.uint32),
        "messages": np.frombuffer(b"why", np.uint8),
    }
    with pytest.raises(CorruptFrame, match="FAULT: message_length says 5 items"):
        decode_faults(frame(encode(FrameKind.FAULT, {"acknowledged": 1}, columns)))


@pytest.mark.parametrize("counts", ["token_count", "top_count", "prompt_count", "prompt_top_count"])
@pytest.mark.parametrize("more", [-1, 1, 2**32 - 4])
def test_a_step_whose_counts_do_not_add_up_is_corrupt(counts: str, more: int) -> None:
    """The router would read tokens that are not there, or give a row those of the next."""
    columns = step_columns()
    decode_step(frame(encode(FrameKind.STEP, step_words(), columns)))
    columns[counts][1] += more
    with pytest.raises(CorruptFrame, match=f"STEP: {counts} says"):
        decode_step(frame(encode(FrameKind.STEP, step_words(), columns)))


def test_a_step_with_an_unknown_finish_is_corrupt() -> None:
    columns = step_columns() | {"finish": np.array([0, 3])}
    with pytest.raises(CorruptFrame, match="STEP: finish 3; there are 0 to 2"):
        decode_step(frame(encode(FrameKind.STEP, step_words(), columns)))


def test_a_fault_may_quote_what_is_no_text() -> None:
    """Such as a path that is no UTF-8: the shard would end while it says why a row has failed."""
    told = Fault(3, "no such file: " + os.fsdecode(b"/tmp/\xff"))
    found = decode_faults(frame(encode_faults(1, [told])))
    assert [fault.message for fault in found] == ["no such file: /tmp/?"]
