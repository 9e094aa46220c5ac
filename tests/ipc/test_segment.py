"""Segments: no names, no missing pages, and a way out when /dev/shm is small."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tgi_trio.errors import SegmentError
from tgi_trio.ipc import segment as segment_module
from tgi_trio.ipc.segment import Segment
from tgi_trio.testing.segments import names_in_shm, names_left


def test_a_segment_has_no_name_and_all_its_pages() -> None:
    before = names_in_shm()
    with Segment.create(1 << 20, label="test") as segment:
        assert not names_left(before)
        status = os.fstat(segment.fd)
        assert status.st_size == 1 << 20
        assert status.st_blocks * 512 >= 1 << 20, "pages are reserved, not promised"
        assert status.st_mode & 0o777 in (0o600, 0o777)  # memfd has no mode of its own
        assert not os.get_inheritable(segment.fd)
        assert bytes(segment.buf[:64]) == bytes(64)


def test_a_segment_has_had_no_name_either() -> None:
    """`kill -9` between two system calls must not leave one."""
    with Segment.create(4096, label="test") as segment:
        assert segment.kind == "shm"
        # Linux calls what has never had a name by its inode.
        name = f"/dev/shm/#{os.fstat(segment.fd).st_ino} (deleted)"
        assert os.readlink(f"/proc/self/fd/{segment.fd}") == name


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EISDIR])
def test_where_every_file_has_a_name_it_is_a_memfd(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_module, "_open_shm", refuse(code))
    with Segment.create(4096, label="test") as segment:
        assert segment.kind == "memfd"


def test_two_mappings_see_the_same_bytes() -> None:
    with Segment.create(4096, label="test") as one, Segment.open(os.dup(one.fd)) as two:
        one.words(8)[0] = 2**64 - 3
        assert two.words(8)[0] == 2**64 - 3
        with pytest.raises(ValueError, match="aligned"):
            one.words(12)


def test_close_is_idempotent_and_live_views_keep_the_mapping() -> None:
    segment = Segment.create(4096, label="test")
    view = segment.words(0)
    fd = segment.fd
    segment.close()
    segment.close()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
    view[0] = 1  # would be SIGSEGV if close() had unmapped


def refuse(code: int) -> object:
    def open_nothing(size: int) -> int:
        raise OSError(code, os.strerror(code))

    return open_nothing


def test_falls_back_to_a_sealed_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_module, "_open_shm", refuse(errno.ENOSPC))
    with Segment.create(8192, label="test") as segment:
        assert segment.kind == "memfd"
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, 4096)
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, 16384)


def test_says_what_to_do_when_there_is_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_module, "_open_shm", refuse(errno.ENOSPC))
    monkeypatch.setattr(segment_module, "_open_memfd", refuse(errno.ENOMEM))
    with pytest.raises(SegmentError, match=r"channel 7: no shared memory of 2\.0 MiB.*--shm-size"):
        Segment.create(2 << 20, label="channel 7")


def test_says_what_the_limit_on_files_refuses() -> None:
    limits, before = resource.getrlimit(resource.RLIMIT_FSIZE), names_in_shm()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(SegmentError, match=r"/dev/shm says 'File too large'.*`ulimit -f`"):
            Segment.create(2 << 20, label="test")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not names_left(before)


def test_other_errors_are_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_module, "_open_shm", refuse(errno.EMFILE))
    with pytest.raises(OSError, match="open files"):
        Segment.create(4096, label="test")


SMALL_SHM = """
import os
from tgi_trio.ipc.segment import Segment
{prepare}
before = sorted(os.listdir("/dev/shm"))
with Segment.create(4 << 20, label="test") as segment:
    segment.buf[:] = b"x" * len(segment.buf)   # SIGBUS here if a page were missing
    print(segment.kind)
assert sorted(os.listdir("/dev/shm")) == before
"""

FILL = """
fd = os.open("/dev/shm/filler", os.O_CREAT | os.O_RDWR)
try:
    while True:
        os.write(fd, bytes(65536))
except OSError:
    pass
"""


@pytest.mark.parametrize(
    ("mount", "prepare", "kind"),
    [
        ("-t tmpfs -o size=1m", "", "memfd"),
        ("-t tmpfs -o size=8m", FILL, "memfd"),
        ("-t tmpfs -o size=8m,ro", "", "memfd"),
        ("-t tmpfs -o size=8m", "", "shm"),
    ],
    ids=["1 MiB", "full", "read-only", "large enough"],
)
def test_in_a_small_dev_shm(mount: str, prepare: str, kind: str) -> None:
    probe = subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip("no permission for a mount namespace (unshare -m)")
    script = textwrap.dedent(SMALL_SHM).format(prepare=prepare)
    shell = f'mount {mount} none /dev/shm && exec "$0" -c "$1"'
    run = subprocess.run(
        ["unshare", "-m", "sh", "-c", shell, sys.executable, script],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == kind
