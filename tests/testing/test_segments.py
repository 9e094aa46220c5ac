"""Names in /dev/shm: one that stays was left, one that goes away was somebody else's."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tgi_trio.ipc.segment import Segment
from tgi_trio.testing.segments import names_in_shm, names_left


@contextmanager
def named() -> Iterator[Path]:
    """A file as a segment of `shm_open` is while it has a name."""
    path = Path("/dev/shm") / secrets.token_hex(16)
    path.touch()
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def test_a_name_that_stays_is_left() -> None:
    before = names_in_shm()
    with named() as path:
        assert path.name in names_in_shm()
        assert path.name in names_left(before, patience=0.1)
        assert path.name not in names_left(before | {path.name})


def test_a_name_that_goes_away_is_not() -> None:
    before = names_in_shm()
    with named() as path:
        end = threading.Timer(0.05, path.unlink)
        end.start()
        assert path.name not in names_left(before)
        end.join()


def test_a_segment_has_none() -> None:
    before = names_in_shm()
    with Segment.create(4096, label="test"):
        assert not names_left(before)
