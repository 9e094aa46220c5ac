"""Opens files that are read whole: only those that have an end, and no larger ones than are meant.

A device may have no end, and a pipe may wait for a writer for ever.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import ExitStack
from io import BufferedReader, BytesIO, TextIOWrapper
from pathlib import Path
from typing import Final

LARGEST: Final = 256 << 20  # bytes of settings, tokenizers and texts
SMALL: Final = 4 << 20  # bytes of keys, certificates, templates and addresses


def open_file(path: Path, most: int | None = None) -> BufferedReader:
    """Open a file to read its bytes; `most`: of them, None: however many it has.

    Raises OSError, also for a device, a pipe or a socket, and for a larger file.
    """
    with ExitStack() as held:
        file = held.enter_context(open(path, "rb", opener=open_at_once))
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(errno.EINVAL, "it is no file, but a device or a pipe", str(path))
        if most is not None and facts.st_size > most:
            raise OSError(errno.EFBIG, f"it is larger than {most >> 20} MiB", str(path))
        held.pop_all()
    return file


def read_file(path: Path, most: int = LARGEST) -> bytes:
    """Return what a file holds. Raises OSError as `open_file` does."""
    with open_file(path, most) as file:
        # Files of /proc have no size, and some wait for the kernel to say something.
        return file.read(os.fstat(file.fileno()).st_size)


def read_text_file(path: Path, most: int = LARGEST, errors: str = "strict") -> str:
    r"""Return a file's text, which is UTF-8; every end of a line is a `\n`.

    `errors`: what becomes of other bytes, as for `open`. Raises OSError as `open_file` does, and
    UnicodeError.
    """
    return TextIOWrapper(BytesIO(read_file(path, most)), "utf-8", errors).read()


def check_file(path: Path, most: int | None = LARGEST) -> None:
    """Raise OSError for a file that a library should not be told to read, as `open_file` does."""
    open_file(path, most).close()


def open_at_once(path: str, flags: int) -> int:
    """Open a file; a pipe at whose other end is nobody is not waited for. An opener of `open`."""
    return os.open(path, flags | os.O_NONBLOCK)
