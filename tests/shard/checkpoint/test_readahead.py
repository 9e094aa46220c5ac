"""Reading ahead: every file of the checkpoint once, no more than memory holds, never an error."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tgi_trio.shard.checkpoint import readahead
from tgi_trio.shard.checkpoint.readahead import reading_ahead


class Recorder:
    """Counts what is read, by inode; `arrived` is set once `expected` bytes were."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, expected: int) -> None:
        self.read: dict[int, int] = {}
        self.arrived = threading.Event()
        self._expected, self._sendfile = expected, os.sendfile
        monkeypatch.setattr(os, "sendfile", self)

    def __call__(self, out: int, source: int, place: int, count: int) -> int:
        inode = os.fstat(source).st_ino
        assert place == self.read.get(inode, 0)  # in one line
        sent = self._sendfile(out, source, place, count)
        self.read[inode] = place + sent
        if sum(self.read.values()) >= self._expected:
            self.arrived.set()
        return sent


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(readahead, "_PIECE", 1000)
    for name, size in (("model-1", 900), ("model-2", 3000)):
        weights = np.arange(size, dtype=np.float32)
        save_file({name: weights}, tmp_path / f"{name}.safetensors")
    return tmp_path


def test_every_file_is_read_to_its_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {file.stat().st_ino: file.stat().st_size for file in folder.iterdir()}
    recorder = Recorder(monkeypatch, sum(sizes.values()))
    with reading_ahead(folder):
        assert recorder.arrived.wait(120)
    assert recorder.read == sizes


def test_no_more_than_half_of_the_free_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readahead, "free_bytes", lambda: 9000)
    recorder = Recorder(monkeypatch, 4500)
    with reading_ahead(folder):
        assert recorder.arrived.wait(120)
    assert sum(recorder.read.values()) == 4500


def test_leaving_the_block_ends_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readahead, "_PIECE", 1)
    Recorder(monkeypatch, 1)
    with reading_ahead(folder):
        pass
    assert "readahead" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("content", [None, b"not safetensors"])
def test_a_folder_that_cannot_be_read_is_left_to_the_loader(
    tmp_path: Path, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)
    with reading_ahead(tmp_path):
        pass


def test_files_that_are_not_in_memory_yet_are_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Just written, both are; then the kernel says of one that reading it would have to wait."""
    with reading_ahead(folder) as fresh:
        assert fresh == frozenset()
    cold, preadv = folder / "model-2.safetensors", os.preadv

    def wait_for_disk(file: int, *arguments: Any) -> int:
        if os.fstat(file).st_ino == cold.stat().st_ino:
            raise BlockingIOError
        return preadv(file, *arguments)

    monkeypatch.setattr(os, "preadv", wait_for_disk)
    with reading_ahead(folder) as fresh:
        assert fresh == {cold}
