"""When the router looks for cyclic garbage: rarely, and never at much while somebody waits for it.

Python's collector stops everything to look at objects, and every stream waits for that. By itself
it looks whenever 700 more have been made, at whatever these hold: a new list of a million numbers
takes 18 ms, what 38,000 tools became 75 ms. All objects of a server with a thousand requests take
50 ms, those of eight bodies of 10 MB two thirds of a second. Connections and requests leave no
cycles behind, nor do errors (`tests/router/http/wire/test_garbage.py`), so there is little to be
found: what libraries make.

So Python's own looks are turned off. Young objects are looked at where these are few, and each
once: what stays is not looked at again before nobody is served. While somebody is, that is done
however few they seem to be: Python counts what has been made less what is gone, whether that was
young or not. A full cache drops as much as it makes, so the count stays small however many young
objects there are, and a look at all of them takes as long as at old ones.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import trio

_LOOK_S: Final = 0.1  # between two looks at young objects
_REST_S: Final = 1.0  # the same while it is quiet: each time the loop is woken
_FEWEST: Final = 700  # young objects that are worth a look where nobody is served
_MOST: Final = 5000  # of which a look takes a millisecond or two; more are of large bodies
# For so long nobody has been served before older ones are looked at, which may take 60 ms: where
# people come once in a while, the next one is not there yet.
_QUIET_S: Final = 5.0
_RUSH: Final = 3  # clients that come between two looks: their requests are not there yet
_MEASURE_S: Final = 300.0  # between two measurements of memory, each of up to ten milliseconds
_WORTH: Final = 100_000  # blocks of memory that have been added, for a look while it is quiet
_PRESSING: Final = 10_000_000  # and for one whoever waits: about a gigabyte
_THOROUGH: Final = 20  # looks at older objects before one at all, which are many

YOUNG, OLDER, ALL = range(3)  # generations of Python's collector


@contextmanager
def collecting_when_told() -> Iterator[None]:
    """Have Python look at no objects by itself within the block, and never at those of now."""
    gc.freeze()  # what is loaded by now stays: no collection need ever walk it again
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


async def collect_in_between(
    requests: Callable[[], int],
    large: Callable[[], int],
    collect: Callable[[int], object] = gc.collect,
    count: Callable[[], tuple[int, int, int]] = gc.get_count,
    measure: Callable[[], int] = sys.getallocatedblocks,
    let_in: Callable[[], int] = lambda: 0,
) -> None:
    """Look at young objects now and then, and at others while nobody is served; until cancelled.

    `requests`: how many are in the house; `large`: how many threads work on large ones. `count`:
    the collector's counts since its last looks; `measure`: blocks of memory that are in use;
    `let_in`: how many clients have come so far.
    """
    quiet, unmeasured, before, known = 0.0, 0.0, measure(), let_in()
    while True:
        was_quiet = quiet >= _QUIET_S
        pause = _REST_S if was_quiet else _LOOK_S
        await trio.sleep(pause)
        came, known = let_in() - known, let_in()
        served = requests()
        quiet = 0.0 if served or came >= _RUSH else quiet + pause
        is_quiet = quiet >= _QUIET_S
        unmeasured += pause
        if unmeasured >= _MEASURE_S or (is_quiet and not was_quiet):
            unmeasured = 0.0
            if measure() - before >= (_WORTH if is_quiet else _PRESSING):
                collect(ALL if count()[ALL] >= _THOROUGH else OLDER)
                before = measure()
        if (0 if served else _FEWEST) <= count()[YOUNG] <= _MOST and not large():
            collect(YOUNG)
