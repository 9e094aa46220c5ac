"""The store of machine code between starts.

A folder's name is a hash of all sources, so after any change of a kernel everything is compiled
anew. Its content is loaded as code, so a folder that another user could have written to is not
used. A file begins with a hash of the rest, so that a file left incomplete by a crash is not
loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from tgi_trio.ipc.shard_output import warn
from tgi_trio.shard.numba_backend.machine_code.locks import held

_KEPT = 4  # versions of the kernels to keep, newest first
_HASH = hashlib.sha256
_HASH_BYTES = 32


def find_or_make(name: str, make: Callable[[], bytes]) -> bytes:
    """Return the stored data of a name, or what `make` returns, which is then stored.

    Of several processes that call this at once, one makes it. Raises what `make` raises.
    """
    folder = find_folder()
    if folder is None:
        return make()
    path = folder / name
    found = _read(path)
    if found is None:
        with held(path.with_suffix(".lock")):
            found = _read(path)
            if found is None:
                found = make()
                _write(path, found)
    return found


def is_kept(name: str) -> bool:
    """Return whether a name is stored; True if there is no store."""
    folder = find_folder()
    return folder is None or (folder / name).exists()


def make_alone(name: str, make: Callable[[], bytes]) -> None:
    """Store what `make` returns, unless it is stored already or another process is making it."""
    folder = find_folder()
    if folder is None:
        return
    path = folder / name
    with held(path.with_suffix(".lock"), patience=0.0) as ours:
        if ours and _read(path) is None:
            _write(path, make())


@cache
def find_folder() -> Path | None:
    """Return the folder for the current sources, which only we can write, or None.

    $NUMBA_CACHE_DIR, the user's cache and the machine's temporary folder are tried, in this order.
    """
    name = _source_hash()
    for base in _places():
        try:
            base.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder = base / name
            folder.mkdir(mode=0o700, exist_ok=True)
            if _is_ours(base) and _is_ours(folder) and os.access(folder, os.W_OK | os.X_OK):
                _prune(base, folder)
                return folder
        except OSError:
            continue
    warn(
        "there is no folder to keep compiled kernels in, so that each start compiles them, for "
        "many seconds: let $NUMBA_CACHE_DIR or $XDG_CACHE_HOME name one that can be written"
    )
    return None


def _read(path: Path) -> bytes | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    found = data[_HASH_BYTES:]
    return found if _HASH(found).digest() == data[:_HASH_BYTES] else None


def _write(path: Path, data: bytes) -> None:
    """Write a file if there is space; other processes see either all of it or no file."""
    new = path.with_suffix(f".{os.getpid()}.new")
    with contextlib.suppress(OSError):  # the cost is only time
        try:
            new.write_bytes(_HASH(data).digest() + data)
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)


def _places() -> Iterator[Path]:
    given = os.environ.get("NUMBA_CACHE_DIR")
    if given:
        yield Path(given) / "tgi-trio-kernels"
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(home):
        yield Path(home) / "tgi-trio" / "kernels"
    with contextlib.suppress(FileNotFoundError):  # the whole file system may be read-only
        yield Path(tempfile.gettempdir()) / f"tgi-trio-kernels-{os.getuid()}"


def _source_hash() -> str:
    backend = Path(__file__).parent.parent
    found = hashlib.sha256()
    rooms = ("kernels", "kinds", "fillers", "machine_code")
    inside = [path for room in rooms for path in (backend / room).rglob("*.py")]
    agreed = ("weight_layout", "tables", "variant", "multiplier", "rooms", "control_block")
    for path in sorted([*inside, *(backend / f"{name}.py" for name in agreed)]):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def _is_ours(folder: Path) -> bool:
    facts = folder.lstat()
    return facts.st_uid == os.getuid() and not facts.st_mode & 0o022


def _prune(base: Path, keep: Path) -> None:
    """Remove the oldest versions beyond `_KEPT`."""
    os.utime(keep)
    folders = sorted(base.iterdir(), key=lambda path: path.lstat().st_mtime, reverse=True)
    for folder in folders[_KEPT:]:
        shutil.rmtree(folder, ignore_errors=True)
