"""Signals before a server handles them itself, and of commands that serve nothing."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

_interrupted_by: int = signal.SIGINT  # or what was taken for it


def handle_stop(stop: Callable[[int, object], None]) -> None:
    """Have SIGTERM call `stop`, and SIGHUP unless it is ignored, as under `nohup`."""
    signal.signal(signal.SIGTERM, stop)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, stop)


def ignore_requests() -> None:
    """Have SIGUSR1 and SIGUSR2 do nothing, in this process and in those that it starts.

    Other servers open their logs anew or replace themselves then; here there is nothing to do, and
    what is sent out of habit, by a rotation of logs, must not end all streams. Not SIGALRM and
    SIGPROF: they are how the kernel ends what decodes for too long.
    """
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.SIG_IGN)


def stop_at_once(number: int, frame: object) -> None:
    """End well until the launcher runs: nothing is served yet."""
    signal.signal(number, signal.SIG_IGN)  # one is enough, and another would change the exit code
    sys.exit(0)


def interrupt(number: int, frame: object) -> None:
    """End a command that serves nothing as Ctrl-C does, but with the signal's own exit code.

    What would go on when it has done its work has to see that it has not.
    """
    global _interrupted_by
    signal.signal(number, signal.SIG_IGN)
    _interrupted_by = number
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a shell's job in the background
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)  # no exception is safe in trio; our children die with us
    signal.raise_signal(signal.SIGINT)  # in trio this ends where it can be handled


def find_exit_code() -> int:
    """Return the exit code after `interrupt`, or Ctrl-C."""
    # Python remembers a KeyboardInterrupt that left an `exec` (as dataclasses have), even one that
    # was handled then, and ends as if SIGINT had killed it. The next `exec` makes it forget.
    exec("")
    return 128 + _interrupted_by
