"""What is kept of kernels between starts: made once, read whole, or made anew."""

from __future__ import annotations

import os
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event
from typing import NoReturn

import pytest

from tests.support.warm_start import start_warm
from tgi_trio.shard.cpu_backend.machine_code import entry, making, store
from tgi_trio.shard.cpu_backend.machine_code.entry import Entry
from tgi_trio.shard.cpu_backend.machine_code.locks import hold_lock


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty store."""
    monkeypatch.setenv("KERNEL_CACHE_DIR", str(tmp_path))
    store.find_folder.cache_clear()
    found = store.find_folder()
    assert found is not None
    assert found.is_relative_to(tmp_path)
    yield found
    store.find_folder.cache_clear()


def fail() -> NoReturn:
    raise RuntimeError("nothing can be made")


def test_what_was_made_is_kept(folder: Path) -> None:
    assert not store.is_kept("some.o")
    assert store.find_or_make("some.o", lambda: b"code") == b"code"
    assert store.is_kept("some.o")
    assert store.find_or_make("some.o", fail) == b"code"
    store.make_alone("some.o", fail)
    assert sorted(path.suffix for path in folder.iterdir()) == [".lock", ".o"]


@pytest.mark.parametrize("left", [b"", b"code", b"\0" * 40])
def test_what_a_crash_has_left_is_made_anew(left: bytes, folder: Path) -> None:
    (folder / "some.o").write_bytes(left)
    assert store.find_or_make("some.o", lambda: b"code") == b"code"
    assert store.find_or_make("some.o", fail) == b"code"


@pytest.mark.parametrize("what", ["pipe", "device", "loop"])
def test_what_has_no_end_is_not_read(what: str, folder: Path) -> None:
    path = folder / "some.o"
    if what == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if what == "device" else path)
    assert store.find_or_make("some.o", lambda: b"code") == b"code"
    assert store.find_or_make("some.o", fail) == b"code"


def test_a_file_that_is_cut_off_is_made_anew(folder: Path) -> None:
    store.find_or_make("some.o", lambda: b"code")
    path = folder / "some.o"
    path.write_bytes(path.read_bytes()[:-1])
    assert store.find_or_make("some.o", lambda: b"other") == b"other"


def test_who_waits_finds_what_the_other_one_has_made(folder: Path) -> None:
    begun, ends = Event(), Event()

    def make() -> bytes:
        begun.set()
        assert ends.wait(60)
        return b"code"

    with ThreadPoolExecutor() as pool:
        first = pool.submit(store.find_or_make, "some.o", make)
        assert begun.wait(60)
        second = pool.submit(store.find_or_make, "some.o", fail)
        store.make_alone("some.o", fail)  # which waits for nobody
        ends.set()
        assert (first.result(60), second.result(60)) == (b"code", b"code")


def test_what_cannot_be_made_is_not_held(folder: Path) -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError, match="nothing can be made"):
            store.find_or_make("some.o", fail)
    with hold_lock(folder / "some.lock", patience=0.0) as ours:
        assert ours
    assert not store.is_kept("some.o")


def test_what_cannot_be_kept_is_made_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "find_folder", lambda: None)
    assert store.find_or_make("some.o", lambda: b"code") == b"code"
    assert store.find_or_make("some.o", lambda: b"other") == b"other"
    assert store.is_kept("some.o")  # nobody would make it beside us
    store.make_alone("some.o", fail)


def test_a_store_that_is_gone_costs_time_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "find_folder", lambda: tmp_path / "not there")
    assert store.find_or_make("some.o", lambda: b"code") == b"code"


def test_a_folder_that_others_may_write_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    folder.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    store.find_folder.cache_clear()
    found = store.find_folder()
    assert found is not None
    assert found.is_relative_to(tmp_path / "home")


def test_a_lock_ends_with_the_process_that_holds_it(tmp_path: Path) -> None:
    program = """
        import os, sys
        from pathlib import Path
        from tgi_trio.shard.cpu_backend.machine_code.locks import hold_lock
        with hold_lock(Path(sys.argv[1])) as ours:
            print(ours, flush=True)
            os.kill(os.getpid(), 9)
    """
    lock = tmp_path / "lock"
    read, write = os.pipe()
    with open(read) as said:
        process = start_warm(["-c", textwrap.dedent(program), str(lock)], write, 2)
        os.close(write)
        assert said.readline() == "True\n"
        assert process.wait(60) == -9
    with hold_lock(lock, patience=0.0) as ours:
        assert ours


def test_nobody_is_waited_for_without_end(tmp_path: Path) -> None:
    with (
        hold_lock(tmp_path / "lock") as first,
        hold_lock(tmp_path / "lock", patience=0.05) as second,
    ):
        assert (first, second) == (True, False)
    with hold_lock(tmp_path / "lock", patience=0.0) as third:
        assert third


def test_threads_that_open_a_kernel_at_once_have_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each had its own, of which one was kept: steps jumped to code that had been freed."""
    meeting = threading.Barrier(2)

    def open_slowly(*_: object) -> object:
        with suppress(threading.BrokenBarrierError):
            meeting.wait(0.2)  # until another is here as well, if it can be
        return object()

    monkeypatch.setattr(entry, "find_or_make", lambda *_: b"")
    monkeypatch.setattr(entry, "open_object", open_slowly)
    kernel = Entry("of_no_module", "of_this_test", 1)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: kernel.open(), range(2))
    assert first is second


def test_versions_of_the_sources_share_what_is_made_of_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry.SHUFFLE.compile(None)
    (kept,) = (folder.parent / "objects").glob("*.o")
    monkeypatch.setattr(store, "_source_hash", lambda: "other")
    store.find_folder.cache_clear()
    assert store.find_folder() == folder.parent / "other"
    assert not entry.SHUFFLE.is_kept()
    made = entry.SHUFFLE.compile(None)
    monkeypatch.setattr(making, "make_optimised", None)  # it is not needed any more
    assert entry.SHUFFLE.compile(None) == made
    monkeypatch.setenv("KERNEL_CPU_NAME", "haswell")  # code for another processor is not the same
    with pytest.raises(TypeError):
        entry.SHUFFLE.compile(None)
    assert kept.exists()


def test_where_nothing_can_be_shared_it_is_made(folder: Path) -> None:
    (folder.parent / "objects").touch()
    for data in (b"code", b"other"):
        assert store.find_or_make_shared(b"origin", partial(bytes, data)) == data


def test_what_was_used_longest_ago_makes_room(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By size: many checkouts on one machine do not take each other's."""
    monkeypatch.setattr(store, "_KEPT_BYTES", 250)
    for age in range(1, 7):
        version = folder.parent / f"version{age}"
        version.mkdir()
        (version / "some.o").write_bytes(bytes(100))
        store.find_or_make_shared(bytes([age]), lambda: bytes(68))
        for path in (version, max(version.parent.glob("objects/*.o"), key=os.path.getctime)):
            os.utime(path, (1e9 - age, 1e9 - age))
    store.find_or_make_shared(bytes([6]), fail)  # it is used, after all
    monkeypatch.setattr(store, "_source_hash", lambda: "other")
    store.find_folder.cache_clear()
    assert store.find_folder() == folder.parent / "other"
    versions = {path.name for path in folder.parent.iterdir()} - {folder.name, "other", "objects"}
    assert versions == {"version1", "version2"}
    for age in (6, 1):
        assert store.find_or_make_shared(bytes([age]), fail) == bytes(68)
    assert len(list((folder.parent / "objects").iterdir())) == 4  # with their locks
