"""Notes which files of the package a process calls functions of, and when."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

import tgi_trio

PACKAGE: Final = str(Path(tgi_trio.__file__).parent) + "/"
_MOST: Final = 1_000_000  # calls kept, the last ones


def nobody() -> str:
    """Name no task: of a process that has none."""
    return ""


@contextmanager
def noting_calls(target: Path, task: Callable[[], str] = nobody) -> Iterator[None]:
    """Write [nanoseconds, file, task] of every call to `target` when the block is left, as JSON.

    On this thread and those that begin in the block. Nanoseconds of the monotonic clock, which
    processes share. A coroutine that goes on counts as no call. `task` names the one that runs.
    """
    calls: deque[tuple[int, str, str]] = deque(maxlen=_MOST)

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE) and _is_new(frame):
            calls.append((time.monotonic_ns(), frame.f_code.co_filename[len(PACKAGE) :], task()))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        target.write_text(json.dumps(list(calls)))


def _is_new(frame: FrameType) -> bool:
    """Whether a function begins: what has been suspended goes on behind its first line."""
    return frame.f_lineno == frame.f_code.co_firstlineno
