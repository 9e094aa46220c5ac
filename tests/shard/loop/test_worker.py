"""The loop over real rings: a scripted router at one end, a fake model at the other."""

from __future__ import annotations

import os
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.shard.loop.held_steps import hold_step
from tests.shard.loop.scripted_router import (
    BLOCK,
    PROMPT,
    ScriptedRouter,
    answer,
    channel,
    fake_shard,
    row,
    rows_of,
)
from tgi_trio.errors import ProtocolMismatch
from tgi_trio.ipc.frame_codec import encode
from tgi_trio.ipc.frames import LAYOUT_HASH, SPECS, VERSION, Finish, FrameKind, Phase
from tgi_trio.ipc.messages import StepReport
from tgi_trio.ipc.startup import WarmupRequest, WarmupResult
from tgi_trio.shard.contract import ShardSequence
from tgi_trio.shard.speculation.payoff import Payoff
from tgi_trio.testing.fake_model import FakeRunner
from tgi_trio.testing.fake_shard import FakeShard


def sequences_after(router: ScriptedRouter, report: StepReport) -> set[int]:
    """Ids in the reports that followed `report`."""
    later = router.reports[router.reports.index(report) + 1 :]
    return {row.sequence for report in later for row in rows_of(report)}


def until_idle(router: ScriptedRouter, *, after: int = -1) -> None:
    """Wait until the shard says that it has nothing to do, in a heartbeat that follows `after`."""
    deadline = time.monotonic() + 120
    while (vitals := router.end.vitals).phase != Phase.IDLE or vitals.heartbeat <= after:
        assert time.monotonic() < deadline
        time.sleep(0.001)


# --- handshake and static facts ------------------------------------------------------------------


@pytest.mark.parametrize(("version", "layout"), [(VERSION + 1, LAYOUT_HASH), (VERSION, 1)])
def test_a_router_that_reads_the_wire_differently_is_refused(version: int, layout: int) -> None:
    words = dict.fromkeys((name for name, _ in SPECS[FrameKind.HELLO].words), 0)
    with channel() as (endpoints, router), FakeShard(endpoints.spec) as shard:
        hello = {"version": version, "layout_hash": layout}
        router.end.send(encode(FrameKind.HELLO, words | hello, {}))
        assert router.receive().word("layout_hash") == LAYOUT_HASH
        shard.wait()
    assert isinstance(shard.error, ProtocolMismatch)
    assert f"{layout:016x}" in str(shard.error) and "same tgi-trio" in str(shard.error)
    assert shard.runner is None


def test_a_router_that_does_not_begin_with_hello_is_refused() -> None:
    with channel() as (endpoints, router), FakeShard(endpoints.spec) as shard:
        router.send(FrameKind.INFO)
        shard.wait()
    assert "its first frame is INFO" in str(shard.error)


def test_hello_comes_before_the_model_is_loaded() -> None:
    with channel() as (endpoints, router), FakeShard(endpoints.spec) as shard:
        frame = router.receive()
        assert frame.kind is FrameKind.HELLO
        assert frame.word("pid") == os.getpid()
        assert frame.word("incarnation") == 1
        assert shard.runner is None  # the router has not said HELLO
        assert router.end.vitals.phase == Phase.LOADING


def test_info_states_the_model() -> None:
    with fake_shard(max_positions=77) as (router, _):
        command = router.send(FrameKind.INFO)
        while (frame := router.receive()).kind is not FrameKind.INFO_REPLY:
            router.end.release()
        words = ("command", "vocab_size", "block_size", "max_positions")
        assert [frame.word(name) for name in words] == [command, 1000, BLOCK, 77]
        assert frame.column("eos_ids").tolist() == [2]
        assert frame.text("names") == "int64\ncpu\nfake\n\n"


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


def test_a_newcomer_joins_at_the_next_step_and_decoding_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on = hold_step(monkeypatch, 4)
    with fake_shard() as (router, _):
        router.prefill(row(1, PROMPT, 40))
        router.until(lambda report: report.step == 3)
        command = router.prefill(row(2, [8, 9], 5))
        go_on.set()
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


def test_a_filtered_sequence_never_moves_after_the_acknowledgement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on = hold_step(monkeypatch, 4)
    with fake_shard() as (router, shard):
        router.prefill(row(1, PROMPT, 60), row(2, [8, 9], 60))
        router.until(lambda report: report.step == 3)
        command = router.filter(1, 99)
        go_on.set()
        report = router.acknowledged(command)
        # Acknowledged before the next step runs, not after it: the blocks are free sooner.
        assert report.sequence == [] and report.held == 1
        # Its blocks are free now: a third sequence gets them at once.
        router.prefill(row(3, [4, 4], 10, blocks=range(17, 20)))
        router.finished(2, 3)
        assert sequences_after(router, report) == {2, 3}
        assert shard.runner is not None and shard.runner.dropped[0] == 1
    assert router.tokens(2) == answer([8, 9], 60)
    assert router.tokens(3) == answer([4, 4], 10)


def test_filtering_the_last_sequence_is_acknowledged_without_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on = hold_step(monkeypatch, 3)
    with fake_shard() as (router, _):
        router.prefill(row(1, PROMPT, 60))
        router.until(lambda report: report.step == 2)
        command = router.filter(1)
        go_on.set()
        report = router.acknowledged(command)
        assert (report.sequence, report.held) == ([], 0)
        report = router.acknowledged(router.filter(1))  # again, for nobody
        assert report.sequence == []


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


def test_chunks_stay_within_the_budget_and_decoding_goes_on_beside_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt = list(range(10, 50))
    go_on = hold_step(monkeypatch, 3)
    with fake_shard() as (router, _):
        router.prefill(row(1, PROMPT, 40))
        router.until(lambda report: report.step == 2)
        limit = router.limits(6)
        command = router.prefill(row(2, prompt, 4))
        go_on.set()
        report = router.acknowledged(command)
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


def test_shutdown_ends_the_loop_after_the_step_in_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = hold_step(monkeypatch, 3)
    with fake_shard() as (router, shard):
        router.prefill(row(1, PROMPT, 60))
        router.until(lambda report: report.step == 2)
        command = router.send(FrameKind.SHUTDOWN)
        go_on.set()
        report = router.acknowledged(command)
        assert (report.sequence, report.held) == ([], 1)
        shard.wait()
        assert router.end.vitals.phase == Phase.STOPPING
        assert shard.error is None


def test_the_gap_is_measured_between_back_to_back_steps_only() -> None:
    with fake_shard(step_ms=1) as (router, _):
        for start in (1, 2):
            router.prefill(row(start, PROMPT, 5))
            router.finished(start)
            until_idle(router)
    steps = [report for report in router.reports if report.sequence]
    assert [report.gap_ns > 0 for report in steps] == [False, *[True] * 4] * 2
    assert all(report.forward_ns >= 1_000_000 for report in steps)


def test_an_idle_shard_says_so() -> None:
    with fake_shard() as (router, _):
        router.prefill(row(1, PROMPT, 3))
        router.finished(1)
        beats = router.end.vitals.heartbeat
        router.acknowledged(router.filter(1))
        until_idle(router, after=beats)
        assert not router.end.wait(0.05)
        assert router.end.vitals.phase == Phase.IDLE
        assert router.end.vitals.step == 3


def test_what_the_first_grammar_needs_is_begun_once_the_model_is_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []
    warm_up = FakeRunner.warm_up

    def note_warm_up(runner: FakeRunner, request: WarmupRequest) -> WarmupResult:
        seen.append("warm-up")
        return warm_up(runner, request)

    def note(_: FakeRunner, sequence: ShardSequence | None) -> bool:
        seen.append("all" if sequence is None else "one")
        return True

    monkeypatch.setattr(FakeRunner, "warm_up", note_warm_up)
    monkeypatch.setattr(FakeRunner, "prepare", note)
    with fake_shard() as (router, _):
        router.prefill(row(1, PROMPT, 1))
        router.finished(1)
    assert seen == ["warm-up", "all"]


def test_a_second_warm_up_starts_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = hold_step(monkeypatch, 3)
    with fake_shard() as (router, _):
        router.prefill(row(1, PROMPT, 60))
        router.until(lambda report: report.step == 2)
        words = dict.fromkeys((name for name, _ in SPECS[FrameKind.WARMUP].words), 0)
        router.send(FrameKind.WARMUP, **{n: v for n, v in words.items() if n != "command"})
        go_on.set()
        while (frame := router.receive()).kind is FrameKind.STEP:
            router.end.release()
        assert frame.kind is FrameKind.WARMUP_REPLY and frame.word("blocks") == 1024
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


def test_right_drafts_save_steps_and_wrong_ones_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model with three words repeats itself now and then; its KV is checked at every step."""
    monkeypatch.setattr(Payoff, "allows", lambda self, rows: True)  # a matter of time
    monkeypatch.setattr(Payoff, "is_resting", lambda self, rows: False)
    prompts = {i: [3, 4, 5, 3 + i % 3] for i in range(1, 7)}
    with fake_shard(speculate=4, vocab_size=6) as (router, _):
        for i, prompt in prompts.items():
            router.prefill(row(i, prompt, 60, top_n=2))
        router.finished(*prompts)
    drafts = sum(report.draft_tokens for report in router.reports)
    for i, prompt in prompts.items():
        assert router.tokens(i) == answer(prompt, 60, vocab_size=6)
        assert all(len(r.tops) == len(r.token_ids) for r in router.rows(i))
    steps = sum(len(report.sequence) for report in router.reports)
    tokens = sum(len(report.token_ids) for report in router.reports)
    assert 0 < tokens - steps < drafts
