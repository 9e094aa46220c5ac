"""What --record-schedule writes is a trace that replays."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from tests.router.scheduling.harness import limits, request
from tgi_trio.errors import ConfigurationError
from tgi_trio.router.scheduling.trace import replay
from tgi_trio.router.telemetry.schedule_recorder import ScheduleRecorder


async def record(path: Path, requests: int, **bounds: int) -> None:
    recorder = ScheduleRecorder(path, **bounds)
    async with trio.open_nursery() as nursery:
        await nursery.start(recorder.run)
        scheduler = recorder.scheduler(limits())
        for id in range(requests):
            scheduler.add(id, request(20), float(id))
            scheduler.schedule(float(id))
            scheduler.abort(id, float(id))
            await trio.sleep(1.0)
        nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_a_recording_replays(tmp_path: Path, autojump_clock: object) -> None:
    await record(tmp_path / "trace", 5)
    lines = (tmp_path / "trace").read_text().splitlines()
    assert len(lines) == 1 + 3 * 5
    assert replay(lines).counters["added"] == 5


@pytest.mark.trio
@pytest.mark.parametrize("bound", ["max_file", "max_waiting"])
async def test_a_recording_that_is_full_ends_with_a_whole_line(
    tmp_path: Path, autojump_clock: object, bound: str, caplog: pytest.LogCaptureFixture
) -> None:
    await record(tmp_path / "trace", 20, **{bound: 1200})
    text = (tmp_path / "trace").read_text()
    assert text.endswith("\n")
    replay(text.splitlines())
    if bound == "max_file":
        assert 600 < len(text) <= 1200
        assert "recording has ended" in caplog.text


@pytest.mark.trio
async def test_a_full_disk_ends_the_recording_and_not_the_server(
    autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    """What was left was written when the file was closed, and the server ended by an OSError."""
    await record(Path("/dev/full"), 3)
    (line,) = caplog.messages
    assert line.startswith("recording has ended: /dev/full: ")
    assert "No space left on device" in line


@pytest.mark.trio
async def test_a_file_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.RaisesGroup(ConfigurationError, match=None) as caught:
        await record(tmp_path / "no such folder" / "trace", 1)
    told = str(caught.value.exceptions[0])
    assert told.startswith("--record-schedule ") and told.endswith(": No such file or directory")
