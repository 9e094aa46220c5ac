"""Where compiled kernels are kept between starts.

numba looks at the file of a function alone to see whether it changed, not at what it calls. So the
folder's name is a hash over all kernels: after any change of any of them everything is compiled
anew. The files are loaded as code: a folder that somebody else could have written is not used.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_KEPT = 4  # versions of the kernels, the newest ones


def cache_folder() -> Path | None:
    """Return a folder of our own for these kernels, or None where no place can be written.

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
    return None


def _places() -> Iterator[Path]:
    given = os.environ.get("NUMBA_CACHE_DIR")
    if given:
        yield Path(given) / "tgi-trio-kernels"
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(home):
        yield Path(home) / "tgi-trio" / "kernels"
    yield Path(tempfile.gettempdir()) / f"tgi-trio-kernels-{os.getuid()}"


def _source_hash() -> str:
    here = Path(__file__).parent
    found = hashlib.sha256()
    names = ("weight_layout", "tables", "variant", "multiplier", "rooms", "control_block")
    agreed = [here.parent / f"{name}.py" for name in names]
    agreed += (here.parent / "kinds").glob("*.py")
    for path in sorted([*here.rglob("*.py"), *agreed]):
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
