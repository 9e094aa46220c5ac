"""Files that are read whole: those that have an end, and are no larger than meant."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tgi_trio.whole_files import SMALL, check_file, open_file, read_file, read_text_file


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


def test_files_of_the_kernel_are_empty() -> None:
    """They have no size, and this one would wait until it has something to say."""
    assert read_file(Path("/proc/kmsg")) == b""
