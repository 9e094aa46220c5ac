"""When Python looks for garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pause_collection() -> Iterator[None]:
    """Do not look for cycles of garbage during the block.

    Imports and compilation make objects by the million that are needed until they are done: to look
    through them again and again is a tenth of the time that compiling takes.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
