"""Progress of loading, as the kernel tells it."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from tgi_trio.router.shards import loading_progress

MIB = 2**20


def checkpoint(folder: Path) -> Path:
    path = folder / "model.safetensors"
    path.write_bytes(os.urandom(4 * MIB))
    return path


READER = """
import mmap, sys
with open(sys.argv[1], "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
    mapped.madvise(mmap.MADV_RANDOM)  # no reading ahead, no pages around a fault
    print("mapped", flush=True)
    input()
    sum(mapped[:: mmap.PAGESIZE])
    print("read", flush=True)
    input()
print("unmapped", flush=True)
input()
"""


def test_what_is_touched_counts_and_what_is_mapped_does_not(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    assert loading_progress.checkpoint_bytes(tmp_path) == 4 * MIB
    command = [sys.executable, "-c", READER, str(path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1) as process:
        assert process.stdin is not None and process.stdout is not None
        touched = {}
        for line in process.stdout:
            touched[line.strip()] = loading_progress.count_touched_bytes(process.pid)
            process.stdin.write("\n")
        assert touched["mapped"] < 2 * MIB
        assert touched["read"] == 4 * MIB
        assert touched["unmapped"] == 0
    assert loading_progress.count_touched_bytes(process.pid) == 0  # no such process


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_PATIENCE", "_PERIOD", "_LINE_PERIOD"):
        monkeypatch.setattr(loading_progress, name, 0.01)
    monkeypatch.setattr(loading_progress, "count_touched_bytes", lambda pid: pid * MIB)


async def show_until(folder: Path, output: io.StringIO, seen: Callable[[], bool]) -> None:
    with trio.fail_after(120):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(loading_progress.show_loading, lambda: [1, 2], folder, output)
            while not seen():
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()


@pytest.mark.usefixtures("hasty")
def test_a_bar_on_a_terminal(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    output = Terminal()
    trio.run(show_until, tmp_path, output, lambda: "3.15M/4.19M" in output.getvalue())


@pytest.mark.usefixtures("hasty")
def test_nothing_is_shown_where_no_thread_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse(*args: object, **options: object) -> None:
        raise RuntimeError("can't start new thread")

    checkpoint(tmp_path)
    monkeypatch.setattr(trio.to_thread, "run_sync", refuse)
    output = Terminal()
    trio.run(loading_progress.show_loading, lambda: [1, 2], tmp_path, output)
    assert not caplog.messages and "M/" not in output.getvalue()


@pytest.mark.usefixtures("hasty")
def test_lines_elsewhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint(tmp_path)
    output = io.StringIO()
    with caplog.at_level(logging.INFO, "tgi_trio"):
        trio.run(show_until, tmp_path, output, lambda: bool(caplog.messages))
    assert caplog.messages[0] == "loading weights: 3 of 4 MB"
    assert output.getvalue() == ""
