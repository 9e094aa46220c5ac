"""Why a process could not be started."""

from __future__ import annotations

import errno
import os

import pytest

from tgi_trio.process.shortages import tell_shortage


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (errno.EMFILE, "no more descriptors may be open: raise the hard limit (`ulimit -Hn`"),
        (errno.EAGAIN, "no more threads or processes can be started: raise the limit of"),
        (errno.ENOMEM, "Cannot allocate memory"),
    ],
)
def test_a_limit_is_named_with_what_raises_it(number: int, told: str) -> None:
    assert tell_shortage(OSError(number, os.strerror(number))).startswith(told)
