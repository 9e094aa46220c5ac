"""How many threads may be started, and what is said and done where there are none to be had."""

from __future__ import annotations

import errno
import itertools
import threading

import pytest
import trio

from tests.support.warm_start import run_warm
from tgi_trio.errors import ConfigurationError, Unavailable
from tgi_trio.process.thread_limit import check_threads, describe_failure
from tgi_trio.process.threads import run_in_thread

NO_THREAD = "can't start new thread"  # as CPython says it


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ten threads be started, and no more."""
    start, count = threading.Thread.start, itertools.count()

    def start_some(thread: threading.Thread) -> None:
        if next(count) >= 10:
            raise RuntimeError(NO_THREAD)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)


@pytest.mark.parametrize("ranks", [1, 8])
def test_threads_that_suffice_end_at_once(ranks: int) -> None:
    before = threading.active_count()
    check_threads(ranks)
    assert threading.active_count() == before


@pytest.mark.parametrize(("ranks", "least"), [(1, 16), (3, 24)])
@pytest.mark.usefixtures("few")
def test_too_few_to_serve_at_all_are_refused(ranks: int, least: int) -> None:
    before = threading.active_count()
    said = rf"^only 10 threads .* takes {least} at least: .*ulimit -u.*TasksMax=.*--pids-limit"
    with pytest.raises(ConfigurationError, match=said):
        check_threads(ranks)
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("error", "known"),
    [
        (RuntimeError(NO_THREAD), True),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), True),
        (RuntimeError("something else"), False),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), False),
    ],
)
def test_what_says_that_there_are_too_many(error: Exception, known: bool) -> None:
    assert ("ulimit -u" in (describe_failure(error) or "")) == known


@pytest.mark.trio
async def test_who_needs_a_thread_meanwhile_is_told_to_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError(NO_THREAD)

    limiter = trio.CapacityLimiter(1)
    monkeypatch.setattr("trio._threads.start_thread_soon", refuse)
    with pytest.raises(Unavailable, match="ulimit -u"):
        await run_in_thread(lambda: None, limiter)
    monkeypatch.undo()
    assert await run_in_thread(lambda: 1, limiter) == 1  # its place among others is free again


STARTS = f"""
import sys, threading
from tgi_trio.__main__ import main
def refuse(*_):
    raise RuntimeError({NO_THREAD!r})
threading._start_new_thread = refuse
sys.exit(main(sys.argv[1:]))
"""


def test_a_start_says_so() -> None:
    done = run_warm("-c", STARTS, "--port", "0")
    assert done.returncode == 1
    assert done.stderr.startswith("tgi-trio: only 0 threads and processes can"), done.stderr
