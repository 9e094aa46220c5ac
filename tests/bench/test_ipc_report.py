"""The benchmark judges its goals from what the same run measured, and says what it could not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench.ipc import __main__ as program
from bench.ipc import extras
from bench.ipc.report import extras_tables, goals, goals_table, round_trip_table
from bench.ipc.sampling import Budget, Case, Row, summarise
from tgi_trio.ipc.frame_codec import Frame, encode
from tgi_trio.ipc.frames import SPECS, FrameKind
from tgi_trio.ipc.messages import decode_step

EXTRAS = {
    "decode": {"total_us": 5.0},
    "gap": {"p50_us": 12.0, "p99_us": 30.0},
    "death": [{"mutex_us": 100.0}, {"mutex_us": 400.0}],
    "idle": {"router_percent": 0.01, "shard_percent": 0.0},
}


def row(transport: str, mode: str, payload: int, p50: float, pinned: bool = True) -> Row:
    return Row(transport, mode, payload, pinned, 100, p50, 2 * p50, 3 * p50)


ROWS = [
    row("C eventfd", "idle", 8, 40.0),
    row("ring, both spin", "hot", 1024, 3.0),
    row("ring, both spin", "hot", 1024, 0.1, pinned=False),
    row("ring, both sleep", "idle", 1024, 100.0),
    row("gRPC sync", "hot", 1024, 400.0),
    row("gRPC aio", "hot", 1024, 300.0),
]


def test_goals_are_ratios_to_the_best_peer_of_the_run() -> None:
    judged, left_out = goals(ROWS, EXTRAS)
    found = {goal.what: (goal.measured, goal.verdict) for goal in judged}
    assert found["hot round trip, 1 KiB, both awake: p50, % of best gRPC"] == (1.0, "met")
    assert found["dispatch while both sleep: times the C eventfd floor"] == (2.5, "met")
    assert found["step gap, 1 ms steps, 512 streams: p50 µs"] == (12.0, "MISSED")
    assert found["death noticed, largest victim: µs"] == (400.0, "met")
    (missing,) = left_out
    assert missing.endswith("no ring, event loop row")
    assert "MISSED" in goals_table(judged)


def test_without_grpc_its_goals_are_left_out() -> None:
    rows = [each for each in ROWS if not each.transport.startswith("gRPC")]
    judged, left_out = goals(rows, EXTRAS)
    assert not any("gRPC" in goal.what for goal in judged)
    assert len(left_out) == 2


def test_the_table_has_a_line_per_transport() -> None:
    lines = round_trip_table(ROWS, True).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == [
        "C eventfd",
        "ring, both spin",
        "ring, both sleep",
        "gRPC sync",
        "gRPC aio",
    ]
    assert "3.00 / 6.00 / 9.00" in lines[3]
    assert "decode" in extras_tables(EXTRAS)


def test_work_is_taken_off_and_the_warm_up_left_out() -> None:
    samples = [9_000_000] * 20 + [3_050_000] * 80
    summary = summarise("x", Case("work", 1024, True), samples)
    assert (summary.p50, summary.p99_9, summary.samples) == (50.0, 50.0, 80)
    assert len(list(Budget(7, 60.0, 3).rounds(Case("hot", 64, True)))) == 7
    assert len(list(Budget(7, 60.0, 3).rounds(Case("idle", 64, True)))) == 3


def test_extras_that_fail_leave_the_round_trips(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(transports: list[str], budget: Budget, rows: list[Row], notes: list[str]) -> None:
        rows.extend(ROWS)

    def broken() -> None:
        raise KeyError("draft_tokens")

    out = tmp_path / "ipc.json"
    monkeypatch.setattr(sys, "argv", ["bench.ipc", "--quick", "--json", str(out)])
    monkeypatch.setattr(program, "run_round_trips", measured)
    monkeypatch.setattr(extras, "decode_reply", broken)
    with pytest.raises(KeyError):
        program.main()
    assert "C eventfd" in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert len(found["rows"]) == len(ROWS)
    assert found["failed"] == "KeyError: 'draft_tokens'"


def test_a_step_frame_has_every_word_of_the_wire() -> None:
    words, columns = extras.step_frame(3)
    report = decode_step(Frame(memoryview(encode(FrameKind.STEP, words, columns))))
    assert report.sequence == [0, 1, 2]
    assert {getattr(report, name) for name, _ in SPECS[FrameKind.STEP].words if name != "step"} == {
        1
    }
