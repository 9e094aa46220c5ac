"""Reads a checkpoint from disk while this process still imports libraries and packs weights.

A mapped file is read as it is touched, so packing would otherwise wait for the disk.
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

_PIECE = 32 << 20  # bytes between checks whether to stop


@contextlib.contextmanager
def reading_ahead(folder: Path) -> Iterator[frozenset[Path]]:
    """Read a checkpoint's files into the system's page cache until the block is left.

    Yields the files that were not cached before: their readers may drop them from the cache
    again. At most half of the free memory is used, since pages that come too early would evict each
    other. A file that cannot be read ends it silently; the loader reports the error.
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
    """Return whether a file's last byte is in the page cache; True if this is unknown."""
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
                # sendfile to /dev/null: the kernel reads ahead at full speed and copies nothing.
                while budget > 0 and not stop.is_set():
                    count = min(_PIECE, budget)
                    sent = os.sendfile(nowhere.fileno(), file.fileno(), place, count)
                    if not sent:
                        break
                    place += sent
                    budget -= sent
