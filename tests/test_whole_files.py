"""Files that are read whole: those that have an end, and are no larger than meant; and written."""

from __future__ import annotations

import os
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from tgi_trio import whole_files
from tgi_trio.whole_files import (
    SMALL,
    check_file,
    open_file,
    read_file,
    read_text_file,
    resolve_links,
    write_whole,
)


def test_what_a_file_holds_is_read(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_bytes(b"one\r\ntwo\xc3\xa4\n")
    link.symlink_to(file)
    for path in (file, link):
        assert read_file(path) == b"one\r\ntwo\xc3\xa4\n"
        assert read_text_file(path) == "one\ntwoä\n"
    file.write_bytes(b"\xff")
    with pytest.raises(UnicodeError):
        read_text_file(file)
    assert read_text_file(file, errors="replace") == "\ufffd"


def test_links_are_resolved_as_far_as_they_lead(tmp_path: Path) -> None:
    folder, link, loop = tmp_path / "folder", tmp_path / "link", tmp_path / "loop"
    folder.mkdir()
    link.symlink_to(folder)
    loop.symlink_to(loop)
    assert resolve_links(link / "file") == folder.resolve() / "file"
    assert resolve_links(loop) == loop.parent.resolve() / "loop"


def test_the_most_is_allowed_and_no_more(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with open(file, "wb") as opened:
        opened.truncate(SMALL)
    assert len(read_file(file, SMALL)) == SMALL
    os.truncate(file, SMALL + 1)
    for read in (read_file, read_text_file, check_file, open_file):
        with pytest.raises(OSError, match="it is larger than 4 MiB") as caught:
            read(file, SMALL)
        assert caught.value.filename == str(file)
    check_file(file, None)


def test_what_is_no_file_is_refused_and_closed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    before = set(os.listdir("/proc/self/fd"))
    for path in (tmp_path / "pipe", Path("/dev/zero"), Path("/dev/null")):
        with pytest.raises(OSError, match="it is no file, but a device or a pipe"):
            open_file(path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        for path in (tmp_path / "socket", tmp_path / "folder", tmp_path / "nothing"):
            with pytest.raises(OSError):
                open_file(path)
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_pipe_is_read_to_its_end_if_it_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `--tools <(command)` gives one."""
    reading, writing = os.pipe()
    path = Path(f"/dev/fd/{reading}")
    try:
        os.write(writing, b"one\n" * 3)
        monkeypatch.setattr(whole_files, "_PIPE_S", 0.01)
        with pytest.raises(OSError, match=r"no end within 0\.01 s"):
            read_file(path)
        monkeypatch.undo()
        for text in (b"one\n", b"\xc3\xa4\n"):
            os.write(writing, text)
        with ThreadPoolExecutor() as threads:
            found = threads.submit(read_text_file, path)
            os.write(writing, b"two")
            os.close(writing)
            assert found.result() == "one\nä\ntwo"
    finally:
        os.close(reading)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="nobody writes to the pipe"):
        read_file(tmp_path / "pipe")


def test_a_pipe_without_end_is_refused() -> None:
    with (
        subprocess.Popen(["yes"], stdout=subprocess.PIPE) as endless,
        pytest.raises(OSError, match="it is larger than 4 MiB"),
    ):
        assert endless.stdout is not None
        try:
            read_file(Path(f"/dev/fd/{endless.stdout.fileno()}"), SMALL)
        finally:
            endless.kill()


def test_files_of_the_kernel_are_empty() -> None:
    """They have no size, and this one would wait until it has something to say."""
    assert read_file(Path("/proc/kmsg")) == b""


def test_what_is_taken_in_parts_is_written_whole(tmp_path: Path) -> None:
    class Slow(FileIO):
        def write(self, data: Any) -> int:
            return super().write(memoryview(data)[:3])

    with Slow(tmp_path / "file", "wb") as file:
        for data in (b"one line\n", b"", b"another"):
            write_whole(file, data)
    assert (tmp_path / "file").read_bytes() == b"one line\nanother"
