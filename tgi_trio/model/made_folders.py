"""Model folders that are made of files elsewhere: a few files of their own, and links.

They lie in a cache, under names made from what they were made of.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

# What links to the weights of a model's own repository begin with, where parts are of others.
OWN: Final = "own-"


def cache_folder(kind: str) -> Path:
    """Return the folder for such folders of a kind, which may not be there yet."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tgi_trio" / kind


def write_folder(target: Path, contents: Mapping[str, bytes], links: Mapping[str, Path]) -> None:
    """Make a folder atomically, since two servers may start at the same time.

    `contents`: by file name; `links`: where each leads, by its own name. Raises OSError.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        made = Path(work, "made")
        made.mkdir()
        for name, content in contents.items():
            (made / name).write_bytes(content)
        for name, path in links.items():
            (made / name).symlink_to(path)
        try:
            os.rename(made, target)
        except OSError:
            if not target.is_dir():
                raise
