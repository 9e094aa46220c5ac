"""The store of machine code between starts.

A folder's name is a hash of all sources, so that a start looks for files without a compiler, and
after any change of a kernel finds none. What LLVM makes is kept in another folder, by a hash of
what it is made of, which all versions of the sources share: after a change only what has changed is
optimised anew. The content is loaded as code, so a folder that another user could have written to
is not used. A file begins with a hash of the rest, so that a file left incomplete by a crash is not
loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Final

from tgi_trio.ipc.shard_output import warn
from tgi_trio.shard.cpu_backend.machine_code.locks import hold_lock
from tgi_trio.whole_files import open_file

NO_FOLDER: Final = (
    "there is no folder to keep compiled kernels in, so that each start compiles them, for many "
    "seconds: let $KERNEL_CACHE_DIR or $XDG_CACHE_HOME name one that can be written"
)
# Bytes of all versions of the kernels to keep, and as many of what they share: those used last.
# Everything that the tests compile is 5 MB, what serves a model a tenth of one.
_KEPT_BYTES = 128 << 20
_SHARED = "objects"
_HASH = hashlib.sha256
_HASH_BYTES = 32


def find_or_make(name: str, make: Callable[[], bytes]) -> bytes:
    """Return the stored data of a name, or what `make` returns, which is then stored.

    Of several processes that call this at once, one makes it. Raises what `make` raises.
    """
    folder = find_folder()
    return make() if folder is None else _find_or_make(folder / name, make)


def find_or_make_shared(origin: bytes, make: Callable[[], bytes]) -> bytes:
    """Do the same for all versions of the sources. `origin`: all that the data is made of."""
    folder = _find_shared()
    if folder is None:
        return make()
    path = folder / f"{_HASH(origin).hexdigest()}.o"
    found = _find_or_make(path, make)
    with contextlib.suppress(OSError):
        os.utime(path)  # see `_prune`
    return found


def _find_or_make(path: Path, make: Callable[[], bytes]) -> bytes:
    found = _read(path)
    if found is None:
        with hold_lock(path.with_suffix(".lock")):
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
    with hold_lock(path.with_suffix(".lock"), patience=0.0) as ours:
        if ours and _read(path) is None:
            _write(path, make())


@cache
def find_folder() -> Path | None:
    """Return the folder for the current sources as `choose_folder` does; None: and a warning."""
    folder = choose_folder()
    if folder is None:
        warn(NO_FOLDER)
    return folder


def choose_folder() -> Path | None:
    """Make and return the folder for the current sources, which only we can write, or None.

    $KERNEL_CACHE_DIR, the user's cache and the machine's temporary folder are tried, in this order.
    """
    name = _source_hash()
    for base in _places():
        try:
            base.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder = base / name
            is_new = not folder.exists()
            folder.mkdir(mode=0o700, exist_ok=True)
            if _is_ours(base) and _is_ours(folder) and os.access(folder, os.W_OK | os.X_OK):
                os.utime(folder)
                if is_new:
                    with contextlib.suppress(OSError):  # others remove files as well
                        _prune(base)
                return folder
        except OSError:
            continue
    return None


def _find_shared() -> Path | None:
    """Return the folder that versions of the sources share; None: there is none."""
    folder = find_folder()
    if folder is None:
        return None
    shared = folder.parent / _SHARED
    try:
        shared.mkdir(mode=0o700, exist_ok=True)
        return shared if _is_ours(shared) else None
    except OSError:
        return None


def _read(path: Path) -> bytes | None:
    try:
        with open_file(path, _KEPT_BYTES) as file:
            data = file.read()
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
    # The second is what it was called while numba compiled the kernels.
    given = os.environ.get("KERNEL_CACHE_DIR") or os.environ.get("NUMBA_CACHE_DIR")
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
    agreed = ("weight_layout", "tables", "variant", "multiplier", "scratch_memory", "control_block")
    for path in sorted([*inside, *(backend / f"{name}.py" for name in agreed)]):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def _is_ours(folder: Path) -> bool:
    facts = folder.lstat()
    return facts.st_uid == os.getuid() and not facts.st_mode & 0o022


def _prune(base: Path) -> None:
    """Remove what was used longest ago, beyond `_KEPT_BYTES`."""
    shared = base / _SHARED
    versions = [path for path in base.iterdir() if path != shared and path.is_dir()]
    for folder in _beyond(versions, _bytes_in):
        shutil.rmtree(folder, ignore_errors=True)
    for path in _beyond(shared.glob("*.o"), lambda path: path.lstat().st_size):
        for each in (path, path.with_suffix(".lock")):
            each.unlink(missing_ok=True)


def _beyond(paths: Iterable[Path], count_bytes: Callable[[Path], int]) -> Iterator[Path]:
    """Yield the paths that do not fit into `_KEPT_BYTES` with those that were used later."""
    total = 0
    for path in sorted(paths, key=lambda path: path.lstat().st_mtime, reverse=True):
        total += count_bytes(path)
        if total > _KEPT_BYTES:
            yield path


def _bytes_in(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.iterdir())
