"""Headers of a response, and its head as bytes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from wsgiref.handlers import format_date_time

Header = tuple[bytes, bytes]


def header_block(headers: Sequence[Header]) -> bytes:
    """Return headers as lines of a response's head. Raises ValueError for header injection."""
    block = b"".join([b"%b: %b\r\n" % header for header in headers])
    if block.count(b"\n") != len(headers) or block.count(b"\r") != len(headers) or b"\0" in block:
        raise ValueError(f"a header may not contain CR, LF or NUL: {headers}")
    return block


class DateHeader:
    """The `date` header of every response, made once a second rather than once a response."""

    def __init__(self) -> None:
        self._second = 0
        self._header: Header = (b"date", b"")

    def __call__(self) -> Header:
        """Return the header for the current second."""
        second = int(time.time())
        if second != self._second:
            self._second = second
            self._header = (b"date", format_date_time(second).encode())
        return self._header
