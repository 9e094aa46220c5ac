"""Refuses pointers of Git LFS: what a clone has in place of large files, if `git lfs` is missing.

A pointer (https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md) is a text below 1024 bytes,
which names the file's hash and size.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tgi_trio.errors import ModelLoadError

_BEGINNING: Final = b"version https://git-lfs.github.com/spec/"
_LONGEST: Final = 1024  # bytes


def refuse_pointers(files: Iterable[Path]) -> None:
    """Raise ModelLoadError if any of the files of one folder is a pointer of Git LFS."""
    pointers = sorted(filter(_is_pointer, files))
    if pointers:
        names = ", ".join(file.name for file in pointers)
        raise ModelLoadError(
            f"{pointers[0].parent} is a clone without its large files, and holds pointers of Git "
            f"LFS in their place: {names}. Run `git lfs pull` there, or name the hub repository "
            "instead of the clone"
        )


def _is_pointer(file: Path) -> bool:
    try:
        if not file.is_file() or file.stat().st_size >= _LONGEST:
            return False
        with file.open("rb") as opened:
            return opened.read(len(_BEGINNING)) == _BEGINNING
    except OSError:  # whoever needs it will say so
        return False
