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
from tgi_trio.shard.checkpoint_files import find_safetensors
from tgi_trio.shard.memory import free_bytes

_PIECE = 32 << 20  # bytes between looks at whether to stop


@contextlib.contextmanager
def reading_ahead(folder: Path) -> Iterator[None]:
    """Bring a checkpoint's files into the system's page cache until the block is left.

    At most half of the memory that is free: pages that come too early would displace each other. A
    file that cannot be read ends it silently; whoever needs the file says so.
    """
    stop = threading.Event()
    reader = threading.Thread(target=_read, args=(folder, stop), name="readahead", daemon=True)
    reader.start()
    try:
        yield
    finally:
        stop.set()
        reader.join()


def _read(folder: Path, stop: threading.Event) -> None:
    budget = free_bytes() // 2
    with contextlib.suppress(OSError, ModelLoadError), open(os.devnull, "wb") as nowhere:
        for path in sorted(set(find_safetensors(folder).values())):
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
