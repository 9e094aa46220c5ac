"""Does the fence work here? The store-load litmus, run by two processes on two cores.

Each round both sides do `mine = round; fence; seen = other's`. Whoever stores first must be seen by
the other, so at least one side sees this round's value. When both see the old one, a load has
overtaken the store before it: the pattern that loses wake-ups. `python -m tgi_trio.ipc.litmus`
prints a table for every fence of this machine, the broken "none" as the control.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

from tgi_trio.ipc.fence import Ordering, choose_ordering, ordering_named, orderings
from tgi_trio.ipc.parent import die_with_parent
from tgi_trio.ipc.segment import Segment

log = logging.getLogger(__name__)

# Word indices in the shared segment. What one side writes is 128 bytes away from everything else.
_READY, _STORED, _STOP, _RESULTS = (0, 16), (64, 96), 128, 256
_MODULE = "tgi_trio.ipc.litmus"  # not __name__: the table is printed by a `__main__`
_PATIENCE_S = 5.0  # a partner that is silent for this long has died


class LitmusOutcome(NamedTuple):
    """What a litmus run saw."""

    rounds: int
    contended: int  # rounds in which at least one side did not see the other: they did overlap
    reordered: int  # rounds in which neither saw the other: impossible with a working fence


def holds(ordering: Ordering) -> bool:
    """Return False when `ordering` lets a load overtake a store; takes about a tenth of a second.

    The start-up self-test for `fence.choose_ordering`. With one core nothing can be shown; the
    fence is taken at its documented word then. A litmus that cannot run counts as failed.
    """
    if ordering.full is None:
        return False
    try:
        return run(ordering, rounds=5_000, seconds=0.05).reordered == 0
    except TimeoutError:
        return False


@cache
def prove_ordering() -> Ordering:
    """Return the ordering of this machine: the first whose fence passes the litmus.

    Runs the litmus once per process.
    """
    return choose_ordering(holds)


def run(ordering: Ordering, *, rounds: int, seconds: float) -> LitmusOutcome:
    """Run the litmus against a child process, for `rounds` or `seconds`, whichever ends first.

    Pins this thread meanwhile; without two cores to use it returns Outcome(0, 0, 0). Raises
    TimeoutError when the child does not come or stops.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return LitmusOutcome(0, 0, 0)
    with Segment.create((_RESULTS + 2 * rounds) * 8, label="litmus") as segment:
        facts = (segment.fd, ordering.name, cores[1], os.getpid())
        command = [sys.executable, "-m", _MODULE, *map(str, facts)]
        with (
            subprocess.Popen(command, pass_fds=(segment.fd,), stderr=subprocess.PIPE) as child,
            _pin_to(cores[0]),
        ):
            try:
                words = segment.words(0, segment.size // 8)
                done, deadline = 0, float("inf")
                for done in _side(words, 0, ordering, rounds):
                    if done == 1:
                        deadline = time.monotonic() + seconds
                    elif time.monotonic() > deadline:
                        break
                words[_STOP] = 1
                return _count(words, done, rounds)
            finally:
                child.kill()
                _log_errors(child)


def _log_errors(child: subprocess.Popen[bytes]) -> None:
    """Log what a child that has ended printed: the traceback of why it did."""
    if child.stderr is not None:
        for line in child.stderr.read().decode(errors="replace").splitlines():
            log.warning("fence test | %s", line)


def _side(words: memoryview, me: int, ordering: Ordering, rounds: int) -> Iterator[int]:
    """Play one side; yield the number of each round that both sides have finished."""
    mine, other = _STORED[me], _STORED[1 - me]
    results = _RESULTS + me * rounds
    fence = ordering.full
    for number in range(1, rounds + 1):
        _meet(words, me, 2 * number)
        if fence is None:
            words[mine] = number
            seen = words[other]
        else:
            words[mine] = number
            fence()
            seen = words[other]
        words[results + number - 1] = seen
        _meet(words, me, 2 * number + 1)
        yield number


def _meet(words: memoryview, me: int, ticket: int) -> None:
    """Wait until the other side is here too; spins, because a sleep would spread the two."""
    words[_READY[me]] = ticket
    other = _READY[1 - me]
    looks = 0
    while words[other] < ticket:
        looks += 1
        if looks & 0xFFF == 0:
            _check_patience(words, looks)


def _check_patience(words: memoryview, looks: int) -> None:
    if words[_STOP]:
        raise SystemExit
    if looks == 0x1000:
        words[_STOP + 1] = int(time.monotonic()) + 1
    elif time.monotonic() > words[_STOP + 1] + _PATIENCE_S:
        raise TimeoutError("the other side of the litmus has gone")


def _count(words: memoryview, done: int, rounds: int) -> LitmusOutcome:
    first, second = (words[_RESULTS + side * rounds :][:done].tolist() for side in (0, 1))
    contended = reordered = 0
    for number, (a, b) in enumerate(zip(first, second, strict=True), start=1):
        contended += a != number or b != number
        reordered += a != number and b != number
    return LitmusOutcome(done, contended, reordered)


@contextmanager
def _pin_to(core: int) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def main(arguments: list[str]) -> None:
    """Print the table, or, with arguments from `run`, play the other side."""
    if arguments:
        fd, name, core, parent = arguments
        die_with_parent(int(parent))
        os.sched_setaffinity(0, {int(core)})
        segment = Segment.open(int(fd))
        words = segment.words(0, segment.size // 8)
        for _ in _side(words, 1, ordering_named(name), (len(words) - _RESULTS) // 2):
            continue
        return
    print(f"{'fence':<10} {'rounds':>8} {'contended':>10} {'reordered':>10}")
    for ordering in orderings():
        outcome = run(ordering, rounds=200_000, seconds=2.0)
        print(f"{ordering.name:<10} {outcome.rounds:>8} {outcome[1]:>10} {outcome[2]:>10}")


if __name__ == "__main__":
    main(sys.argv[1:])
