"""When Python's cyclic garbage collector runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pause_collection() -> Iterator[None]:
    """Disable the cyclic garbage collector within the block.

    Imports and compilation make millions of objects that live until they are done: traversing them
    again and again is a tenth of the time of compiling.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
