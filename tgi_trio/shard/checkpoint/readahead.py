"""A checkpoint comes from the disk while this process still imports libraries and packs weights.

A mapped file is read as it is touched, and whoever touches it (packing) would wait for the disk.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.checkpoint_tensors import SUFFIXES, weight_files
from tgi_trio.shard.machine.memory import free_bytes

_PIECE = 32 << 20  # bytes between looks at whether to stop


@contextlib.contextmanager
def reading_ahead(folder: Path) -> Iterator[frozenset[Path]]:
    """Bring a checkpoint's files into the system's page cache until the block is left.

    Yields those that were not there before: whoever has read them may take them out again. At most
    half of the memory that is free is used: pages that come too early would displace each other. A
    file that cannot be read ends it silently; whoever needs the file says so.
    """
    files = [path for suffix in SUFFIXES for path in folder.glob(f"*{suffix}")]
    fresh = frozenset(path for path in files if not _is_cached(path))
    stop = threading.Event()
    reader = threading.Thread(target=_read, args=(folder, stop), name="readahead", daemon=True)
    reader.start()
    try:
        yield fresh
    finally:
        stop.set()
        reader.join()


def _is_cached(path: Path) -> bool:
    """Return whether the last byte of a file is in the page cache; True where none can tell."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        try:
            os.preadv(file.fileno(), [bytearray(1)], path.stat().st_size - 1, os.RWF_NOWAIT)
        except BlockingIOError:
            return False
    return True


def _read(folder: Path, stop: threading.Event) -> None:
    budget = free_bytes() // 2
    with contextlib.suppress(OSError, ModelLoadError), open(os.devnull, "wb") as nowhere:
        for path in weight_files(folder):
            with path.open("rb") as file:
                place = 0
                # To nowhere: the kernel reads ahead of it at full speed and copies nothing.
                while budget > 0 and not stop.is_set():
                    count = min(_PIECE, budget)
                    sent = os.sendfile(nowhere.fileno(), file.fileno(), place, count)
                    if not sent:
                        break
                    place += sent
                    budget -= sent
