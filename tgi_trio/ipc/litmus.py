"""The store-load litmus test: checks on two cores that the memory fence works on this machine.

In each round both sides do `mine = round; fence; seen = other's`. At least one side has to see the
other's new value. If both see the old one, a load has overtaken the store before it, which is the
reordering that loses wake-ups. `python -m tgi_trio.ipc.litmus` prints a table for every fence of
this machine, with "none" as the control.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from typing import Final, NamedTuple

from tgi_trio.errors import SegmentError
from tgi_trio.ipc.fence import Ordering, choose_ordering, find_ordering, orderings
from tgi_trio.ipc.parent import die_with_parent
from tgi_trio.ipc.segment import Segment

log = logging.getLogger(__name__)

# Word indices in the shared segment. What one side writes is 128 bytes away from everything else.
_READY, _STORED, _STOP, _RESULTS = (0, 16), (64, 96), 128, 256
_MODULE = "tgi_trio.ipc.litmus"  # not __name__: the table is printed by a `__main__`
_PATIENCE_S = 60.0  # silence of a partner that has not ended, after which it counts as dead
_ROUNDS: Final = 5_000  # of the self-test, at most


class LitmusOutcome(NamedTuple):
    """Counts of a litmus run."""

    rounds: int
    contended: int  # rounds in which a side did not see the other's value: they did overlap
    reordered: int  # rounds in which neither did: impossible with a working fence


def holds(ordering: Ordering) -> bool:
    """Return whether `ordering` passes the litmus test, which takes a twentieth of a second.

    The start-up self-test for `fence.choose_ordering`. With one core nothing can be tested and the
    fence is trusted. A test that cannot run counts as failed.
    """
    if ordering.full is None:
        return False
    try:
        return run(ordering, rounds=_ROUNDS, seconds=0.05).reordered == 0
    except TimeoutError:
        return False


@cache
def prove_ordering() -> Ordering:
    """Return the first ordering whose fence passes the litmus test; tested once per process."""
    return choose_ordering(holds)


def run(ordering: Ordering, *, rounds: int, seconds: float) -> LitmusOutcome:
    """Run the test with a child process, for `rounds` or `seconds`, whichever ends first.

    Pins this thread meanwhile. Returns LitmusOutcome(0, 0, 0) without two cores. Raises
    TimeoutError if the child does not start or stops.
    """
    if len(os.sched_getaffinity(0)) < 2:
        return LitmusOutcome(0, 0, 0)
    with _take_early(ordering, rounds) or _Partner(ordering, rounds) as partner:
        words = partner.begin()
        done, deadline = 0, float("inf")
        with _pin_to(partner.opposite):
            for done in _side(words, 0, ordering, rounds, partner.has_ended):
                if done == 1:
                    deadline = time.monotonic() + seconds
                elif time.monotonic() > deadline:
                    break
        words[_STOP] = 1
        return _count(words, done, rounds)


class _Partner:
    """The other side of the test: a process that waits until it is told to begin."""

    def __init__(self, ordering: Ordering, rounds: int) -> None:
        """Start the process; needs two cores. Raises SegmentError, OSError."""
        self.opposite, own = sorted(os.sched_getaffinity(0))[:2]
        self.plays = (ordering.name, rounds)
        with ExitStack() as undo:
            size = (_RESULTS + 2 * rounds) * 8
            self._segment = undo.enter_context(Segment.create(size, label="litmus"))
            facts = (self._segment.fd, ordering.name, own, os.getpid())
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, *map(str, facts)],
                pass_fds=(self._segment.fd,),
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                process_group=0,  # Ctrl-C in a terminal is not meant for it
            )
            self._open = undo.pop_all()

    def begin(self) -> memoryview:
        """Have it begin; returns the words of the shared memory."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):  # it has died, which `_meet` will report
                self._process.stdin.write(b"!")
                self._process.stdin.flush()
        return self._segment.words(0, self._segment.size // 8)

    def has_ended(self) -> bool:
        """Return whether its process has."""
        return self._process.poll() is not None

    def __enter__(self) -> _Partner:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill it, and log what it has printed, such as a traceback."""
        with self._open, suppress(BrokenPipeError), self._process:
            self._process.kill()
            if self._process.stderr is not None:
                for line in self._process.stderr.read().decode(errors="replace").splitlines():
                    log.warning("fence test | %s", line)


# The partner that `partner_ahead` has started, until it is used.
_EARLY: Final[ContextVar[list[_Partner]]] = ContextVar("partners of the litmus")


def _take_early(ordering: Ordering, rounds: int) -> _Partner | None:
    early = _EARLY.get([])
    return early.pop() if early and early[0].plays == (ordering.name, rounds) else None


@contextmanager
def partner_ahead() -> Iterator[None]:
    """Start the partner for a `prove_ordering` within the block.

    Starting a process takes longer than the test itself, so other work may be done meanwhile.
    """
    early: list[_Partner] = []
    if len(os.sched_getaffinity(0)) > 1:
        with suppress(SegmentError, OSError, RuntimeError):  # `prove_ordering` will report these
            early.append(_Partner(orderings()[0], _ROUNDS))
    token = _EARLY.set(early)
    try:
        yield
    finally:
        _EARLY.reset(token)
        while early:
            early.pop().__exit__()


def _side(
    words: memoryview, me: int, ordering: Ordering, rounds: int, gone: Callable[[], bool]
) -> Iterator[int]:
    """Run one side; yields the number of each round that both sides have finished.

    `gone`: whether the other side's process has ended.
    """
    mine, other = _STORED[me], _STORED[1 - me]
    results = _RESULTS + me * rounds
    fence = ordering.full
    for number in range(1, rounds + 1):
        _meet(words, me, 2 * number, gone)
        if fence is None:
            words[mine] = number
            seen = words[other]
        else:
            words[mine] = number
            fence()
            seen = words[other]
        words[results + number - 1] = seen
        _meet(words, me, 2 * number + 1, gone)
        yield number


def _meet(words: memoryview, me: int, ticket: int, gone: Callable[[], bool]) -> None:
    """Wait for the other side (a barrier); spins, so that both go on at the same time."""
    words[_READY[me]] = ticket
    other = _READY[1 - me]
    looks, since = 0, 0.0
    while words[other] < ticket:
        looks += 1
        if looks & 0xFFF == 0:
            if words[_STOP]:
                raise SystemExit
            if looks == 0x1000:
                since = time.monotonic()
            # Whether it is here by now is looked at after the clock: this side may have been the
            # one that stood still.
            elif time.monotonic() > since + _PATIENCE_S and words[other] < ticket:
                raise TimeoutError("the other side of the litmus has gone")
            # A system call, so only now and then; one that has ended may have been here before.
            if looks & 0x3FFFF == 0 and gone() and words[other] < ticket:
                raise TimeoutError("the other side of the litmus has ended")


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
        if not sys.stdin.buffer.read(1):
            return
        os.sched_setaffinity(0, {int(core)})
        segment = Segment.open(int(fd))
        words = segment.words(0, segment.size // 8)
        rounds = (len(words) - _RESULTS) // 2
        for _ in _side(words, 1, find_ordering(name), rounds, lambda: False):  # we end with it
            continue
        return
    print(f"{'fence':<10} {'rounds':>8} {'contended':>10} {'reordered':>10}")
    for ordering in orderings():
        outcome = run(ordering, rounds=200_000, seconds=2.0)
        print(f"{ordering.name:<10} {outcome.rounds:>8} {outcome[1]:>10} {outcome[2]:>10}")


if __name__ == "__main__":
    main(sys.argv[1:])
