"""Reads files whole: only those that have an end, and no larger ones than are meant; writes whole.

A device may have no end, and a pipe may wait for a writer for ever. A pipe that somebody writes to,
such as a shell makes of `<(command)`, is read within bounds.
"""

from __future__ import annotations

import errno
import json
import os
import select
import stat
import time
from collections.abc import Callable
from contextlib import ExitStack
from io import BufferedReader, BytesIO, FileIO, TextIOWrapper
from pathlib import Path
from typing import Any, Final

Pairs = Callable[[list[tuple[str, Any]]], Any]

LARGEST: Final = 256 << 20  # bytes of settings, tokenizers and texts
SMALL: Final = 4 << 20  # bytes of keys, certificates, templates and addresses
_PIPE_S: Final = 10.0  # seconds within which a pipe must end
_PIECE: Final = 1 << 16  # bytes of a pipe that are read at once


def open_file(path: Path, most: int | None = None) -> BufferedReader:
    """Open a file to read its bytes; `most`: of them, None: however many it has.

    Raises OSError, also for a device, a pipe or a socket, and for a larger file.
    """
    with ExitStack() as held:
        file = held.enter_context(open(path, "rb", opener=open_at_once))
        _check(file, path, most)
        held.pop_all()
    return file


def read_file(path: Path, most: int = LARGEST) -> bytes:
    """Return what a file holds, or a pipe. Raises OSError as `open_file` does.

    Also for a pipe that nobody writes to, or that has not ended within ten seconds.
    """
    with open(path, "rb", opener=open_at_once) as file:
        if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
            return _read_pipe(file.fileno(), path, most)
        # Files of /proc have no size, and some wait for the kernel to say something.
        return file.read(_check(file, path, most))


def _check(file: BufferedReader, path: Path, most: int | None) -> int:
    """Return how many bytes a file has. Raises OSError for what is none, and for a larger one."""
    facts = os.fstat(file.fileno())
    if not stat.S_ISREG(facts.st_mode):
        raise OSError(errno.EINVAL, "it is no file, but a device or a pipe", str(path))
    if most is not None and facts.st_size > most:
        raise _too_large(path, most)
    return facts.st_size


def _read_pipe(pipe: int, path: Path, most: int) -> bytes:
    until, content, written = time.monotonic() + _PIPE_S, bytearray(), select.poll()
    written.register(pipe, select.POLLIN)
    while True:
        try:
            piece = os.read(pipe, _PIECE)
        except BlockingIOError:
            if not written.poll(max(0.0, until - time.monotonic()) * 1000):
                raise OSError(errno.ETIMEDOUT, f"no end within {_PIPE_S:g} s", str(path)) from None
            continue
        if not piece:
            break
        content += piece
        if len(content) > most:
            raise _too_large(path, most)
    if not content:
        raise OSError(errno.ENODATA, "nobody writes to the pipe", str(path))
    return bytes(content)


def _too_large(path: Path, most: int) -> OSError:
    return OSError(errno.EFBIG, f"it is larger than {most >> 20} MiB", str(path))


def parse_json(content: bytes, pairs: Pairs | None = None) -> Any:
    """Return what JSON says. Raises ValueError, also for what is nested too deeply.

    `pairs`: makes something else of the pairs of an object than a dict.
    """
    try:
        return json.loads(content, object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_text_file(path: Path, most: int = LARGEST, errors: str = "strict") -> str:
    r"""Return a file's text, which is UTF-8; every end of a line is a `\n`.

    `errors`: what becomes of other bytes, as for `open`. Raises OSError as `open_file` does, and
    UnicodeError.
    """
    return TextIOWrapper(BytesIO(read_file(path, most)), "utf-8", errors).read()


def check_file(path: Path, most: int | None = LARGEST) -> None:
    """Raise OSError for a file that a library should not be told to read, as `open_file` does."""
    open_file(path, most).close()


def resolve_links(path: Path) -> Path:
    """Return a path without links, as far as they lead anywhere: a loop stays as it is.

    Path.resolve raises RuntimeError for a loop, before Python 3.13.
    """
    return Path(os.path.realpath(path))


def write_whole(file: FileIO, data: bytes) -> None:
    """Write all of `data` to an unbuffered file. Raises OSError.

    A disk that is nearly full takes a part of it at first, and says so only when asked for more.
    """
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def open_at_once(path: str, flags: int) -> int:
    """Open a file; a pipe at whose other end is nobody is not waited for. An opener of `open`."""
    return os.open(path, flags | os.O_NONBLOCK)
