"""Warnings in a shard's output: lines that begin with `<4>`, as in sd-daemon(3)."""

from __future__ import annotations

import sys
from typing import Final

_WARNING: Final = "<4>"  # of syslog's levels


def warn(text: str) -> None:
    """Write a warning of a shard's to standard error, as one line that the router logs as one."""
    print(_WARNING + " ".join(text.split()), file=sys.stderr, flush=True)


def split_warning(line: str) -> tuple[bool, str]:
    """Return whether a line is a warning, and the line without the mark."""
    return line.startswith(_WARNING), line.removeprefix(_WARNING)
