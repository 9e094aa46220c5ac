"""When the router looks for cyclic garbage: mostly while it serves nobody.

Python's collector stops everything to look at objects. The 700 that came last take a fraction of a
millisecond, and the thousands that have been looked at once 3 to 10 ms, ten times a second under
load. All of them take 50 ms with a thousand requests in the house, every few seconds. Every stream
would wait for that. Connections and requests leave no cycles behind
(`tests/router/http/wire/test_garbage.py`), so there is little to be found: errors with tracebacks,
and what libraries make.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import trio

_YOUNG: Final = 700  # objects after which Python looks at these, as it does by itself
_NEVER: Final = 1 << 30  # such looks after which it would look at older ones as well
_WORTH: Final = 100  # the same, after which we look at all when nobody waits for it
_PRESSING: Final = 3000  # and whoever waits: there are some two million objects more than before
_LOOK_AGAIN: Final = 1.0  # seconds


@contextmanager
def collecting_young() -> Iterator[None]:
    """Have Python look at young objects alone within the block, and at none that are there now."""
    gc.freeze()  # what is loaded by now stays: no collection need ever walk it again
    thresholds, was_enabled = gc.get_threshold(), gc.isenabled()
    gc.set_threshold(_YOUNG, _NEVER, _NEVER)
    gc.enable()
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if not was_enabled:
            gc.disable()


async def collect_when_idle(
    requests: Callable[[], int],
    collect: Callable[[], object] = gc.collect,
    count: Callable[[], tuple[int, int, int]] = gc.get_count,
) -> None:
    """Look at all objects while nobody is served, or when there are very many; until cancelled.

    `requests`: how many are in the house; `count`: the collector's counts since its last looks.
    """
    while True:
        await trio.sleep(_LOOK_AGAIN)
        if count()[1] >= (_PRESSING if requests() else _WORTH):
            collect()
