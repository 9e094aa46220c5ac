"""Ctrl-C while a program is still being imported."""

from __future__ import annotations

import signal


def end_silently() -> None:
    """Have Ctrl-C end the process as other signals do, until `main` begins.

    Raised in the middle of an import, it would print a traceback.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
