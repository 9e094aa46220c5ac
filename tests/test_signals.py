"""The signals that end a program, and those that it has been told to let be."""

from __future__ import annotations

import signal

from tgi_trio.signals import received_signals


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert signal.SIGHUP in received_signals()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert received_signals() == (signal.SIGINT, signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, before)
