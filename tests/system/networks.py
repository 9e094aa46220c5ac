"""Tests that change this machine's networks, and those that must not see it, take turns.

Chromium breaks off whatever it fetches when an address comes or goes (ERR_NETWORK_CHANGED).
"""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def networks(*, changed: bool) -> Iterator[None]:
    """Have nobody change them meanwhile; `changed`: nor rely on them, as this block does it."""
    path = Path(tempfile.gettempdir()) / "tgi-trio-tests-networks"  # for all workers
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if changed else fcntl.LOCK_SH)
        yield
