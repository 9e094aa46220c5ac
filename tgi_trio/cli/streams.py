"""Standard input, output and error, whatever a program was started with."""

from __future__ import annotations

import os
import sys

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))  # by their descriptors


def open_standard_streams() -> None:
    """Open /dev/null in the place of standard streams that are closed.

    Otherwise the next file or socket gets their number: a shard would find its own input where a
    ring should be, and what is printed would be written to a client.
    """
    for fd, (name, mode) in enumerate(_STREAMS):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
            os.set_inheritable(fd, True)
            setattr(sys, name, os.fdopen(fd, mode, closefd=False))


def forget_reader() -> None:
    """Have what is printed from now on go nowhere: whoever read it has left."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
