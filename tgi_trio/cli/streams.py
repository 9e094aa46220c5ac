"""Standard input, output and error, even if the program was started without them."""

from __future__ import annotations

import os
import sys

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))  # in the order of their descriptors


def open_standard_streams() -> None:
    """Open /dev/null in place of closed standard streams.

    Otherwise the next file or socket would get their descriptor: a shard would find its input where
    a ring should be, and output would go to a client.
    """
    for fd, (name, mode) in enumerate(_STREAMS):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor
            os.set_inheritable(fd, True)
            setattr(sys, name, os.fdopen(fd, mode, closefd=False))


def forget_reader() -> None:
    """Discard all further output, since its reader has closed it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
