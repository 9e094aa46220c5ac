"""What the name of a model is: a folder of this machine, or a repository of the hub."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from tgi_trio.errors import ModelLoadError

_MOST_NAMED: Final = 5  # folders in an error
_LONGEST: Final = 200  # characters of a name in an error
_ADDRESS: Final = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/|https?://", re.I)


def local_folder(name: str, flag: str) -> Path | None:
    """Return the folder that a flag's value names; None for the name of a hub repository.

    Raises ModelLoadError for a folder that is not there or may not be read, and for an address.
    """
    if is_there(name, flag):
        folder = Path(name).expanduser()
        if folder.is_dir():
            _look_into(folder, flag)
        return folder
    refuse_address(name, flag)
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ModelLoadError(f"there is no folder {name}: {flag} takes a folder or a name")
    return None


def is_there(name: str, flag: str) -> bool:
    """Return whether the name of a model is a path of this machine.

    Raises ModelLoadError where that cannot be told: behind a folder that this user may not enter.
    """
    try:
        Path(name).expanduser().stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False  # ValueError: no path has a NUL
    except OSError as error:
        raise _unreadable(name, flag, error.strerror or str(error)) from error
    except RuntimeError as error:  # `~` of a user that there is not
        raise _unreadable(name, flag, "there is no such home folder") from error
    return True


def _look_into(folder: Path, flag: str) -> None:
    """Raise ModelLoadError for a folder that this user may not list, or not enter.

    What looks for files in it would find none, or fail for each in words of its own.
    """
    try:
        os.stat(os.path.join(folder, "."))
        os.scandir(folder).close()
    except OSError as error:
        raise _unreadable(str(folder), flag, error.strerror or str(error)) from error


def _unreadable(name: str, flag: str, why: str) -> ModelLoadError:
    shown = name if len(name) <= _LONGEST else f"{name[:_LONGEST]}..."
    return ModelLoadError(
        f"{shown} cannot be looked into: {why}. {flag} takes a folder that the server's user may "
        "read, or a name"
    )


def refuse_address(name: str, flag: str) -> None:
    """Raise ModelLoadError for the address of a repository in place of its name."""
    found = _ADDRESS.match(name)
    if found is not None and not is_there(name, flag):
        owner, _, rest = name[found.end() :].partition("/")
        raise ModelLoadError(
            f"{name} is an address, and {flag} takes the name of a hub repository (owner/name)"
            + (f": {owner}/{rest.partition('/')[0]}" if rest else "")
        )


def hint_at_models(folder: Path) -> str:
    """Return the end of a sentence that names models below a folder which is none itself.

    A trainer keeps its checkpoints in folders below its own, and so does the hub's cache.
    """
    found = [
        str(file.parent.relative_to(folder))
        for pattern in ("*/config.json", "snapshots/*/config.json")
        for file in sorted(folder.glob(pattern))
    ]
    if not found:
        return ""
    more = ", ..." if len(found) > _MOST_NAMED else ""
    return f"; folders in it do: {', '.join(found[:_MOST_NAMED])}{more}"
