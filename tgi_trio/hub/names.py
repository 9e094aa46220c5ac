"""What the name of a model is: a folder of this machine, or a repository of the hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from tgi_trio.errors import ModelLoadError

_MOST_NAMED: Final = 5  # folders in an error
_ADDRESS: Final = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/|https?://", re.I)


def local_folder(name: str, flag: str) -> Path | None:
    """Return the folder that a flag's value names; None for the name of a hub repository.

    Raises ModelLoadError for a folder that is not there, and for an address.
    """
    folder = Path(name).expanduser()
    if folder.exists():
        return folder
    refuse_address(name, flag)
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ModelLoadError(f"there is no folder {name}: {flag} takes a folder or a name")
    return None


def refuse_address(name: str, flag: str) -> None:
    """Raise ModelLoadError for the address of a repository in place of its name."""
    found = _ADDRESS.match(name)
    if found is not None and not Path(name).exists():
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
