"""SIGINT, SIGTERM and SIGHUP, for programs that run in trio and end in an order of their own."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import trio

from tgi_trio.process.name_lookups import NameThreads

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def received_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that end a program, without a SIGHUP that `nohup` has it ignore.

    A terminal that closes sends SIGHUP: what it ended at once would break off all streams.
    """
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return _SIGNALS[:-1] if ignored else _SIGNALS


def run_to_its_end(run: Callable[[Sequence[int]], Awaitable[None]]) -> None:
    """Have trio run a program that receives `received_signals()` itself. Main thread only.

    `run` is given the signals that came before it could receive any. Raises what it raises.

    From here on no signal raises anything, however many come: an exception out of nowhere, inside
    trio or in the middle of a clean-up, tears nurseries apart and leaves what was to be closed.
    One that comes before the program receives signals is kept for it; one that comes when all is
    done but to exit is too late.

    Names are looked up apart from all else that runs in threads (`name_lookups.py`): those of
    replicas, ranks and shards are looked up again for as long as nobody answers.
    """
    early: list[int] = []

    async def main() -> None:
        trio.socket.set_custom_hostname_resolver(NameThreads())
        try:
            await run(early)
        finally:
            # While trio still runs: it closes what signals wake it by before it stops to be woken,
            # and Python prints a traceback for one that comes in between.
            _ignore_signals()

    for number in received_signals():
        signal.signal(number, lambda number, frame: early.append(number))
    try:
        trio.run(main)
    finally:
        _ignore_signals()


def _ignore_signals() -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
