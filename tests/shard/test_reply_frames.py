"""What the loop answers, in frames that fit the ring."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.shard.loop.scripted_router import answer, fake_shard, row, rows_of
from tests.support.step_frames import encode_report
from tgi_trio.ipc.frame_codec import Frame, encode
from tgi_trio.ipc.frames import SPECS, Finish, FrameKind, Phase
from tgi_trio.ipc.messages import Fault, StepReport, decode_faults, decode_step
from tgi_trio.shard.alternatives import Listed
from tgi_trio.shard.contract import Choices, PromptValues
from tgi_trio.shard.loop import reply_frames
from tgi_trio.shard.loop.step_columns import MovedRows, to_columns


def test_a_large_step_is_divided_and_counted_once() -> None:
    prompts = {i: [i + 3, i + 4] for i in range(60)}
    with fake_shard(reply_bytes=2**14, blocks=2000) as (router, _):
        for i, prompt in prompts.items():
            router.prefill(row(i, prompt, 4, top_n=20))
        router.finished(*prompts)
        for i, prompt in prompts.items():
            assert router.tokens(i) == answer(prompt, 4)
            for step in router.rows(i):
                assert [logprob for _, logprob in step.tops[0]] == [-0.5 - n for n in range(20)]
    by_step: dict[int, list[StepReport]] = {}
    for report in router.reports:
        by_step.setdefault(report.step, []).append(report)
    assert any(len(parts) > 1 for parts in by_step.values())
    for parts in by_step.values():
        assert len({part.acknowledged for part in parts}) == 1
        moved = sum(len(part.sequence) for part in parts)
        assert parts[0].decode_rows <= moved
        assert not any(part.decode_rows or part.forward_ns for part in parts[1:])


def test_prompt_logprobs_longer_than_a_frame_arrive_in_order() -> None:
    request = row(1, [7] * 900, 2, blocks=range(1, 300), prompt_logprobs=True, prompt_top_n=9)
    with fake_shard(reply_bytes=2**12, blocks=1000) as (router, _):
        assert router.end.page.reply_bytes < 2 * 4 * len(request.token_ids)
        router.prefill(request)
        router.finished(1)
    logprobs = [p for r in router.rows(1) for p in r.prompt_logprobs]
    assert math.isnan(logprobs[0])
    assert logprobs[1:] == [-1.0] * 899
    tops = [top for r in router.rows(1) for top in r.prompt_tops]
    assert tops == [[]] + [[(n, -1.0 - n) for n in range(9)]] * 899
    assert len(router.tokens(1)) == 2


def test_a_router_that_does_not_read_loses_nothing() -> None:
    with fake_shard(reply_bytes=2**12) as (router, _):
        router.prefill(*(row(i, [i + 3, i + 4], 40, top_n=3) for i in range(1, 6)))
        assert router.end.wait(120)
        while router.end.vitals.phase != Phase.REPLYING or router.end.vitals.step < 5:
            assert router.end.wait(0.01)  # frames are there, and stay there
        blocked = router.end.vitals
        while router.end.vitals.heartbeat < blocked.heartbeat + 3:  # it lives, in the same step
            router.end.wait(0.001)
        router.finished(*range(1, 6))
    for i in range(1, 6):
        assert router.tokens(i) == answer([i + 3, i + 4], 40)


def make_report(rows: list[tuple[int, int, int]]) -> StepReport:
    """A report with (tokens, alternatives per token, prompt logprobs) per row, all distinct."""
    report = StepReport(9, 4, 1, 2, 3, len(rows), 5, 6, 7)
    for i, (tokens, tops, prompts) in enumerate(rows):
        report.sequence.append(100 + i)
        report.computed.append(i)
        report.token_count.append(tokens)
        report.prompt_count.append(prompts)
        report.finish.append(Finish.EOS if tokens else Finish.NONE)
        for _ in range(tokens):
            report.token_ids.append(len(report.token_ids))
            report.logprobs.append(-float(len(report.logprobs)))
            report.top_count.append(tops)
            report.top_ids.extend(range(len(report.top_ids), len(report.top_ids) + tops))
            report.top_logprobs.extend([-1.0] * tops)
        at = len(report.prompt_logprobs)
        report.prompt_logprobs.extend(float(n) for n in range(at, at + prompts))
        report.prompt_top_count.extend([tops] * prompts)
        every = range(len(report.prompt_top_ids), len(report.prompt_top_ids) + tops * prompts)
        report.prompt_top_ids.extend(every)
        report.prompt_top_logprobs.extend(-float(n) for n in every)
    return report


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 6), st.sampled_from([0, 0, 1, 50, 900])),
        max_size=30,
    ),
    st.sampled_from([600, 2040, 10**6]),
)
def test_a_report_divided_into_frames_says_the_same(
    rows: list[tuple[int, int, int]], most: int
) -> None:
    report = make_report(rows)
    report.seen_sequence, report.seen_image, report.seen_ns = [7, 2**63], [0, 1], [0, 2**40]
    frames = list(encode_report(report, most))
    assert all(len(frame) <= most for frame in frames)
    parts = [decode_step(Frame(memoryview(frame))) for frame in frames]
    for name in (
        *("token_ids", "logprobs", "top_count", "top_ids", "prompt_logprobs"),
        *("prompt_top_count", "prompt_top_ids", "prompt_top_logprobs"),
        *("seen_sequence", "seen_image", "seen_ns"),
    ):
        assert [x for part in parts for x in getattr(part, name)] == getattr(report, name)
    for name in ("gap_ns", "forward_ns", "sample_ns", "prefill_tokens", "decode_rows"):
        assert sum(getattr(part, name) for part in parts) == getattr(report, name)
    assert {(part.step, part.acknowledged, part.held) for part in parts} == {(9, 4, len(rows))}
    merged: dict[int, list[int]] = {}
    for part in parts:
        for moved in rows_of(part):
            state = merged.setdefault(moved.sequence, [0, 0, 0])
            assert not state[2], "rows after the finishing one"
            state[0] += len(moved.token_ids)
            state[1] += len(moved.prompt_logprobs)
            state[2] = moved.finish
    assert [(s[0], s[1], s[2]) for s in merged.values()] == [
        (tokens, prompts, Finish.EOS if tokens else Finish.NONE) for tokens, _, prompts in rows
    ]


def test_a_large_step_is_divided_where_a_prompt_has_nothing_more_to_report() -> None:
    """The last token of a prompt is computed alone, beside rows with many alternatives."""
    rows, tops = 40, 50
    ones, ids = np.ones(rows, np.int64), np.arange(rows)
    none, moved = PromptValues([]), MovedRows(ids, ids, ids, ones, np.zeros(rows, np.int64))
    listed = Listed.of([[(n, -1.0 - n) for n in range(tops)]] * rows)
    columns = to_columns(moved, Choices(ones, ids, np.zeros(rows), listed), {3: none})
    frames = reply_frames.StepFrames().encode({"step": 1}, columns, 4096)
    parts = [decode_step(Frame(memoryview(frame))) for frame in frames]
    assert len(parts) > 1 and [id for part in parts for id in part.token_ids] == ids.tolist()
    assert sum(len(part.top_ids) for part in parts) == rows * tops


def test_faults_are_divided_and_long_messages_cut() -> None:
    faults = [Fault(i, "ä" * 5000) for i in range(40)]
    frames = list(reply_frames.encode_fault_frames(3, faults, 2040))
    assert all(len(frame) <= 2040 for frame in frames)
    decoded = [fault for frame in frames for fault in decode_faults(Frame(memoryview(frame)))]
    assert [fault.sequence for fault in decoded] == list(range(40))
    assert all(set(fault.message) == {"ä"} for fault in decoded)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),  # rows
            st.integers(0, 2),  # alternatives of each token
            st.sampled_from(["as before", "fixed", "changed in place", "another dtype"]),
            st.integers(0, 2**40),
        ),
        max_size=14,
    )
)
def test_steps_are_encoded_as_if_none_had_been_before(
    steps: list[tuple[int, int, str, int]],
) -> None:
    """Columns of the step before may come again, changed or not."""
    frames, before = reply_frames.StepFrames(), dict[str, Any]()
    for number, (rows, listed, how, word) in enumerate(steps):
        columns: dict[str, Any] = {
            "sequence": np.arange(number, number + rows, dtype=np.uint64),
            "computed": np.full(rows, 3 * number),
            "token_count": np.ones(rows, np.int64),
            "prompt_count": np.zeros(rows, np.int64),
            "finish": np.zeros(rows, np.uint8),
            "token_ids": np.full(rows, number),
            "logprobs": np.linspace(-number, 0, rows),
            "top_count": np.full(rows, listed, np.uint32),
            "top_ids": np.arange(rows * listed, dtype=np.int32 if how == "fixed" else np.int64),
            "top_logprobs": np.full(rows * listed, -0.5 * number),
        }
        if before and rows == len(before["sequence"]) and how != "another dtype":
            columns |= {name: before[name] for name in ("sequence", "token_ids")}
        if how == "changed in place" and columns["token_ids"].flags.writeable:
            columns["token_ids"][:] = 7 + number
        if how == "fixed":
            for array in columns.values():
                array.flags.writeable = False
        if not listed and number % 2:
            del columns["top_ids"], columns["top_logprobs"]
        words = {name: 0 for name, _ in SPECS[FrameKind.STEP].words} | {
            "step": number,
            "held": word,
        }
        expected = encode(FrameKind.STEP, words, columns)
        assert frames.encode({"step": number, "held": word}, columns, 1 << 20) == [expected]
        before = columns
