"""The console script `tgi-trio`: all else is imported once Ctrl-C ends it without a traceback."""

from __future__ import annotations

from tgi_trio.process.early_interrupt import end_silently


def run() -> int:
    """Run one command and return the exit code."""
    end_silently()
    from tgi_trio.__main__ import main

    return main()
