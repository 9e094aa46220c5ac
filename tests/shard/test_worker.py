"""The loop over real rings: a scripted router at one end, a fake model at the other."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.shard.scripted_router import BLOCK, ScriptedRouter, channel, fake_shard, row, rows_of
from tgi_trio.errors import PeerGone, ProtocolMismatch
from tgi_trio.ipc.channel import ShardEnd
from tgi_trio.ipc.frames import LAYOUT_HASH, SPECS, VERSION, Finish, Frame, Kind, Phase, encode
from tgi_trio.ipc.messages import Fault, StepReport, decode_faults, decode_step
from tgi_trio.ipc.spawn import spawn_shard
from tgi_trio.shard import replies, worker
from tgi_trio.testing.fake_model import FakeRunner, FakeSettings, continuation
from tgi_trio.testing.fake_shard import FakeShard

PROMPT = [5, 6, 7]


def answer(prompt: list[int], count: int, **options: object) -> list[int]:
    settings = FakeSettings(block_size=BLOCK, **options)  # type: ignore[arg-type]
    return continuation(settings, prompt, count)


def sequences_after(router: ScriptedRouter, report: StepReport) -> set[int]:
    """Ids in the reports that followed `report`."""
    later = router.reports[router.reports.index(report) + 1 :]
    return {row.sequence for report in later for row in rows_of(report)}


# --- handshake and static facts ------------------------------------------------------------------


@pytest.mark.parametrize(("version", "layout"), [(VERSION + 1, LAYOUT_HASH), (VERSION, 1)])
def test_a_router_that_reads_the_wire_differently_is_refused(version: int, layout: int) -> None:
    words = dict.fromkeys((name for name, _ in SPECS[Kind.HELLO].words), 0)
    with channel() as (endpoints, router), FakeShard(endpoints.spec) as shard:
        hello = {"version": version, "layout_hash": layout}
        router.end.send(encode(Kind.HELLO, words | hello, {}))
        assert router.receive().word("layout_hash") == LAYOUT_HASH
        shard.wait()
    assert isinstance(shard.error, ProtocolMismatch)
    assert f"{layout:016x}" in str(shard.error) and "same tgi-trio" in str(shard.error)
    assert shard.runner is None


def test_a_router_that_does_not_begin_with_hello_is_refused() -> None:
    with channel() as (endpoints, router), FakeShard(endpoints.spec) as shard:
        router.send(Kind.INFO)
        shard.wait()
    assert "its first frame is INFO" in str(shard.error)


def test_hello_comes_before_the_model_is_loaded() -> None:
    with channel() as (endpoints, router), FakeShard(endpoints.spec) as shard:
        frame = router.receive()
        assert frame.kind is Kind.HELLO
        assert frame.word("pid") == os.getpid()
        assert frame.word("incarnation") == 1
        assert shard.runner is None  # the router has not said HELLO
        assert router.end.vitals.phase == Phase.LOADING


def test_info_states_the_model() -> None:
    with fake_shard(max_positions=77) as (router, _):
        command = router.send(Kind.INFO)
        while (frame := router.receive()).kind is not Kind.INFO_REPLY:
            router.end.release()
        words = ("command", "vocab_size", "block_size", "max_positions")
        assert [frame.word(name) for name in words] == [command, 1000, BLOCK, 77]
        assert frame.column("eos_ids").tolist() == [2]
        assert frame.text("names") == "int64\ncpu\nfake"


# --- standing orders -----------------------------------------------------------------------------


def test_a_sequence_is_answered_to_its_end() -> None:
    with fake_shard() as (router, shard):
        router.prefill(row(1, PROMPT, 10))
        router.finished(1)
        assert router.tokens(1) == answer(PROMPT, 10)
        assert router.finish(1) == Finish.LENGTH
        assert router.reports[-1].held == 0
        assert [r.computed for r in router.rows(1)] == list(range(3, 13))
        assert shard.runner is not None and shard.runner.dropped == [1]


def test_a_newcomer_joins_at_the_next_step_and_decoding_goes_on() -> None:
    with fake_shard(step_ms=1) as (router, _):
        router.prefill(row(1, PROMPT, 40))
        router.until(lambda report: report.step == 3)
        command = router.prefill(row(2, [8, 9], 5))
        joined = router.acknowledged(command)
        assert joined.sequence == [1, 2]
        assert (joined.decode_rows, joined.prefill_tokens) == (1, 2)
        router.finished(1, 2)
    assert router.tokens(1) == answer(PROMPT, 40)
    assert router.tokens(2) == answer([8, 9], 5)
    assert [r.step for r in router.rows(1)] == list(range(1, 41))  # not one step missed


def test_acknowledged_numbers_never_fall_and_steps_count_up() -> None:
    with fake_shard() as (router, _):
        for i in range(1, 6):
            router.prefill(row(i, [i, i], 10))
        router.finished(*range(1, 6))
    numbers = [report.acknowledged for report in router.reports]
    assert numbers == sorted(numbers)
    steps = [report.step for report in router.reports if report.sequence]
    assert steps == list(range(1, len(steps) + 1))


def test_a_filtered_sequence_never_moves_after_the_acknowledgement() -> None:
    with fake_shard(step_ms=1) as (router, shard):
        router.prefill(row(1, PROMPT, 60), row(2, [8, 9], 60))
        router.until(lambda report: report.step == 3)
        report = router.acknowledged(router.filter(1, 99))
        # Acknowledged before the next step runs, not after it: the blocks are free sooner.
        assert report.sequence == [] and report.held == 1
        # Its blocks are free now: a third sequence gets them at once.
        router.prefill(row(3, [4, 4], 10, blocks=range(17, 20)))
        router.finished(2, 3)
        assert sequences_after(router, report) == {2, 3}
        assert shard.runner is not None and shard.runner.dropped[0] == 1
    assert router.tokens(2) == answer([8, 9], 60)
    assert router.tokens(3) == answer([4, 4], 10)


def test_filtering_the_last_sequence_is_acknowledged_without_a_step() -> None:
    with fake_shard(step_ms=1) as (router, _):
        router.prefill(row(1, PROMPT, 60))
        router.until(lambda report: report.step == 2)
        report = router.acknowledged(router.filter(1))
        assert (report.sequence, report.held) == ([], 0)
        report = router.acknowledged(router.filter(1))  # again, for nobody
        assert report.sequence == []


def test_clear_cache_drops_everything() -> None:
    with fake_shard(step_ms=1) as (router, shard):
        router.prefill(row(1, PROMPT, 60), row(2, PROMPT, 60))
        report = router.acknowledged(router.send(Kind.CLEAR_CACHE))
        assert (report.sequence, report.held) == ([], 0)
        assert shard.runner is not None and sorted(shard.runner.dropped) == [1, 2]


def test_a_stalled_sequence_is_reported_once_and_goes_on_when_extended() -> None:
    with fake_shard() as (router, _):
        router.prefill(row(1, PROMPT, 10, blocks=[1]))
        report = router.until(lambda report: report.stalled_rows == 1)
        assert (report.sequence, report.held) == ([], 1)
        assert router.rows(1)[-1].computed == BLOCK
        assert not router.end.wait(0.05)  # it sleeps
        report = router.acknowledged(router.extend(1, 2, 3, 4))
        assert report.sequence == [1] and report.stalled_rows == 0
        router.finished(1)
    assert router.tokens(1) == answer(PROMPT, 10)


def test_a_stalled_sequence_does_not_hold_the_others_up() -> None:
    with fake_shard() as (router, _):
        router.prefill(row(1, PROMPT, 10, blocks=[1]), row(2, [8, 9], 20, blocks=range(2, 9)))
        router.finished(2)
        assert router.tokens(2) == answer([8, 9], 20)
        stalled = [r.stalled_rows for r in router.reports if r.sequence == [2]]
        assert stalled and set(stalled) == {1}


def test_a_sequence_sits_out_until_its_grammar_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled = threading.Event()
    monkeypatch.setattr(FakeRunner, "prepare", lambda self, sequence: compiled.is_set())
    with fake_shard() as (router, _):
        router.prefill(row(1, PROMPT, 10, grammar="x"), row(2, [8, 9], 20))
        router.finished(2)
        assert router.tokens(2) == answer([8, 9], 20) and not router.rows(1)
        command = router.prefill(row(3, PROMPT, 5, grammar="y"))
        router.acknowledged(command)  # with nothing that can move
        router.acknowledged(router.filter(3))
        compiled.set()
        router.finished(1)
        assert router.tokens(1) == answer(PROMPT, 10) and not router.rows(3)


def test_chunks_stay_within_the_budget_and_decoding_goes_on_beside_them() -> None:
    prompt = list(range(10, 50))
    with fake_shard(step_ms=1) as (router, _):
        router.prefill(row(1, PROMPT, 40))
        router.until(lambda report: report.step == 2)
        limit = router.limits(6)
        report = router.acknowledged(router.prefill(row(2, prompt, 4)))
        assert report.acknowledged > limit
        router.finished(1, 2)
    assert router.tokens(1) == answer(PROMPT, 40)
    assert router.tokens(2) == answer(prompt, 4)
    steps = [r for r in router.reports if r.acknowledged > limit]
    assert max(r.decode_rows + r.prefill_tokens for r in steps) == 6
    assert [r.computed for r in router.rows(2)][:8] == [5, 10, 15, 20, 25, 30, 35, 40]
    assert [r.step for r in router.rows(1)] == list(range(1, 41))


def test_eos_min_new_tokens_and_ignore_eos() -> None:
    with fake_shard(eos_after=2) as (router, _):
        router.prefill(
            row(1, PROMPT, 9),
            row(2, PROMPT, 9, min_new_tokens=4),
            row(3, PROMPT, 6, ignore_eos=True),
            row(4, PROMPT, 3),
        )
        router.finished(1, 2, 3, 4)
    counts = [len(router.tokens(i)) for i in range(1, 5)]
    ends = [router.finish(i) for i in range(1, 5)]
    assert counts == [3, 5, 6, 3]
    assert ends == [Finish.EOS, Finish.EOS, Finish.LENGTH, Finish.LENGTH]


def test_shutdown_ends_the_loop_after_the_step_in_hand() -> None:
    with fake_shard(step_ms=1) as (router, shard):
        router.prefill(row(1, PROMPT, 60))
        router.until(lambda report: report.step == 2)
        report = router.acknowledged(router.send(Kind.SHUTDOWN))
        assert (report.sequence, report.held) == ([], 1)
        shard.wait()
        assert router.end.vitals.phase == Phase.STOPPING
        assert shard.error is None


def test_the_gap_is_measured_between_back_to_back_steps_only() -> None:
    with fake_shard(step_ms=1) as (router, _):
        for start in (1, 2):
            router.prefill(row(start, PROMPT, 5))
            router.finished(start)
            while router.end.vitals.phase != Phase.IDLE:
                time.sleep(0.001)
    steps = [report for report in router.reports if report.sequence]
    assert [report.gap_ns > 0 for report in steps] == [False, *[True] * 4] * 2
    assert all(report.forward_ns >= 1_000_000 for report in steps)


def test_an_idle_shard_says_so() -> None:
    with fake_shard() as (router, _):
        router.prefill(row(1, PROMPT, 3))
        router.finished(1)
        beats = router.end.vitals.heartbeat
        router.acknowledged(router.send(Kind.CLEAR_CACHE))
        assert not router.end.wait(0.05)
        assert router.end.vitals.phase == Phase.IDLE
        assert router.end.vitals.step == 3
        assert router.end.vitals.heartbeat > beats


def test_a_second_warm_up_starts_afresh() -> None:
    with fake_shard(step_ms=1) as (router, _):
        router.prefill(row(1, PROMPT, 60))
        router.until(lambda report: report.step == 2)
        words = dict.fromkeys((name for name, _ in SPECS[Kind.WARMUP].words), 0)
        router.send(Kind.WARMUP, **{n: v for n, v in words.items() if n != "command"})
        while (frame := router.receive()).kind is Kind.STEP:
            router.end.release()
        assert frame.kind is Kind.WARMUP_REPLY and frame.word("blocks") == 1024
        router.end.release()
        assert router.acknowledged(router.command).held == 0


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(3, 999), min_size=1, max_size=30),
            st.integers(1, 12),
            st.sampled_from([None, 1, 2, 5]),
        ),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 40),
    st.sampled_from([0, 3]),
)
def test_any_mixture_is_answered_exactly_as_alone(
    requests: list[tuple[list[int], int, int | None]], budget: int, speculate: int
) -> None:
    """Requests join at any time, some are filtered on the way; nobody notices the others."""
    with fake_shard(speculate=speculate) as (router, _):
        router.limits(budget)
        for i, (prompt, count, _) in enumerate(requests, start=1):
            router.prefill(row(i, prompt, count))
            router.step()
        for i, (_, count, stop_at) in enumerate(requests, start=1):
            if stop_at is None:
                router.finished(i)
            else:
                while len(router.tokens(i)) < min(stop_at, count):
                    router.step()
                router.acknowledged(router.filter(i))
    for i, (prompt, count, stop_at) in enumerate(requests, start=1):
        whole = answer(prompt, count)
        got = router.tokens(i)
        assert got == whole[: len(got)]
        assert len(got) == count or stop_at is not None


def test_right_guesses_save_steps_and_wrong_ones_change_nothing() -> None:
    """A model with three words repeats itself now and then; its KV is checked at every step."""
    few = {"vocab_size": 6}
    prompts = {i: [3, 4, 5, 3 + i % 3] for i in range(1, 7)}
    with fake_shard(speculate=4, **few) as (router, _):
        for i, prompt in prompts.items():
            router.prefill(row(i, prompt, 60, top_n=2))
        router.finished(*prompts)
    drafts = sum(report.draft_tokens for report in router.reports)
    for i, prompt in prompts.items():
        assert router.tokens(i) == answer(prompt, 60, **few)
        assert all(len(r.tops) == len(r.token_ids) for r in router.rows(i))
    steps = sum(len(report.sequence) for report in router.reports)
    tokens = sum(len(report.token_ids) for report in router.reports)
    assert 0 < tokens - steps < drafts


# --- faults --------------------------------------------------------------------------------------


def test_a_row_that_cannot_be_run_faults_and_the_others_of_its_command_run() -> None:
    with fake_shard() as (router, _):
        router.prefill(row(1, PROMPT, 5), row(2, [1000], 5), row(3, [8, 9], 5, blocks=[999]))
        router.finished(1)
    assert router.tokens(1) == answer(PROMPT, 5)
    assert "from 1000 to 1000; the model has 0 to 999" in (router.fault(2) or "")
    assert "KV blocks [999]" in (router.fault(3) or "")
    assert router.faults[0].sequence == 2


def test_an_extension_by_blocks_that_do_not_exist_faults_the_sequence() -> None:
    with fake_shard() as (router, _):
        router.prefill(row(1, PROMPT, 10, blocks=[1]))
        router.until(lambda report: report.stalled_rows == 1)
        report = router.acknowledged(router.extend(1, 0))
    assert "KV blocks [0]" in (router.fault(1) or "")
    assert report.held == 0


def test_prefill_before_warm_up_faults() -> None:
    with channel() as (endpoints, router), FakeShard(endpoints.spec):
        router.hello()
        router.receive()
        router.end.release()
        router.acknowledged(router.prefill(row(1, PROMPT, 5)))
    assert "before WARMUP" in (router.fault(1) or "")


@pytest.mark.parametrize("culprits", [{1}, {7}, {3, 4}, {1, 2, 3, 4, 5, 6, 7}])
def test_rows_that_fail_alone_fault_and_the_others_go_on(culprits: set[int]) -> None:
    prompts = {i: [i + 10, 666] if i in culprits else [i + 10, 5] for i in range(1, 8)}
    with fake_shard(fail_token=666) as (router, _):
        router.prefill(*(row(i, prompt, 6) for i, prompt in prompts.items()))
        router.finished(*prompts)
        router.acknowledged(router.prefill(row(8, PROMPT, 6)))
        router.finished(8)
    for i, prompt in prompts.items():
        if i in culprits:
            assert "RuntimeError: token 666 cannot be computed" in (router.fault(i) or "")
            assert router.tokens(i) == []
        else:
            assert router.tokens(i) == answer(prompt, 6)
            assert [r.step for r in router.rows(i)] == list(range(1, 7))
    assert router.tokens(8) == answer(PROMPT, 6)
    assert not any(report.recovered for report in router.reports)


def test_a_step_that_raises_and_can_be_computed_in_parts_fails_nobody_and_says_so() -> None:
    prompts = {i: [i + 10, 5] for i in range(1, 6)}
    with fake_shard(fail_above=2) as (router, _):
        router.prefill(row(9, PROMPT, 3))
        router.finished(9)
        router.prefill(*(row(i, prompt, 6) for i, prompt in prompts.items()))
        router.finished(*prompts)
    for i, prompt in prompts.items():
        assert router.tokens(i) == answer(prompt, 6)
        assert router.fault(i) is None
    steps = [report.recovered for report in router.reports if report.sequence]
    assert steps == [0] * 3 + [1] * 6


# --- frames that fit the ring --------------------------------------------------------------------


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
    frames = list(replies.encode_report(report, most))
    assert all(len(frame) <= most for frame in frames)
    parts = [decode_step(Frame(memoryview(frame))) for frame in frames]
    for name in (
        *("token_ids", "logprobs", "top_count", "top_ids", "prompt_logprobs"),
        *("prompt_top_count", "prompt_top_ids", "prompt_top_logprobs"),
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


def test_faults_are_divided_and_long_messages_cut() -> None:
    faults = [Fault(i, "ä" * 5000) for i in range(40)]
    frames = list(replies.encode_fault_frames(3, faults, 2040))
    assert all(len(frame) <= 2040 for frame in frames)
    decoded = [fault for frame in frames for fault in decode_faults(Frame(memoryview(frame)))]
    assert [fault.sequence for fault in decoded] == list(range(40))
    assert all(set(fault.message) == {"ä"} for fault in decoded)


# --- processes -----------------------------------------------------------------------------------


def run_shard(arguments: Callable[[str], list[str]]) -> tuple[int, str]:
    """Run `python -m tgi_trio.shard` on a channel whose router says HELLO; code and stderr."""
    with channel() as (endpoints, router):
        router.hello()
        argv = [sys.executable, "-m", "tgi_trio.shard", *arguments(endpoints.spec.text())]
        with spawn_shard(argv, endpoints, stderr=subprocess.PIPE) as child:
            assert child.process.stderr is not None
            code = child.process.wait(timeout=60)
            return code, child.process.stderr.read().decode()


def test_bad_arguments_end_with_2_and_say_what_is_allowed() -> None:
    code, errors = run_shard(lambda spec: [spec])
    assert code == 2 and "usage" in errors
    code, errors = run_shard(lambda spec: [spec, '{"model": "x"}'])
    assert code == 2 and "'model'" in errors and "model_path, dtype" in errors


def test_a_model_that_cannot_be_loaded_is_the_last_word() -> None:
    settings = json.dumps({"model_path": "/nonexistent/model"})
    code, errors = run_shard(lambda spec: [spec, settings])
    assert code == 1
    last = errors.strip().splitlines()[-1]
    assert last.startswith("shard 0 cannot go on: ") and "/nonexistent/model" in last


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_for_the_whole_service_does_not_end_a_shard(number: int) -> None:
    """Its router drains first; a service manager may signal every process of the service."""
    with channel() as (endpoints, router):
        argv = [sys.executable, "-m", "tgi_trio.testing.fake_shard", endpoints.spec.text()]
        with spawn_shard([*argv, json.dumps({"block_size": BLOCK})], endpoints) as child:
            router.start()
            os.kill(child.pid, number)
            router.prefill(row(1, PROMPT, 6))
            router.finished(1)
            router.send(Kind.SHUTDOWN)
            assert child.process.wait(timeout=30) == 0
    assert router.tokens(1) == answer(PROMPT, 6)


def test_the_death_of_the_router_ends_the_loop_quietly() -> None:
    class Orphan(ShardEnd):
        def wait(self, timeout: float | None) -> bool:
            raise PeerGone("router (pid 1)", "it died")

    with channel() as (endpoints, router):
        router.hello()
        end = Orphan.attach(endpoints.spec.text())
        worker.run(end, lambda: FakeRunner(FakeSettings()))
        assert np.frombuffer(router.end.try_receive() or b"", "<u8")[0] == Kind.HELLO
