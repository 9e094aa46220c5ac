"""Files that may change while a program runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import trio

LOOK_SECONDS: Final = 1.0  # between two looks at whether they have changed

Stamp = tuple[int, int, int]  # inode, time and size of a file


async def watch_files(paths: Sequence[Path], changed: Callable[[], None]) -> None:
    """Call `changed` whenever any of the files has changed, until cancelled.

    The first look counts as a change: what has been read before may have been another by then.
    A file that is not there is looked for; that it has gone is a change, too.
    """
    seen: list[Stamp | None] = []
    while True:
        await trio.sleep(LOOK_SECONDS)
        stamps = [_stamp(path) for path in paths]
        if stamps != seen:
            seen = stamps
            changed()


def _stamp(path: Path) -> Stamp | None:
    """Return what changes with the file: most editors and mounted ConfigMaps write another one."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
