"""Downloads adapters that a model brings along in folders below its own."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tgi_trio.hub.download import download
from tgi_trio.hub.repository import Repository
from tgi_trio.model.adapters.own_adapters import find_own_adapters
from tgi_trio.model.config import read_values

_FILES: Final = ("adapter_config.json", "adapter_model.safetensors")


def fetch_adapters(repository: Repository, folder: Path) -> None:
    """Download them into a model's `folder`, which is of a snapshot.

    Raises ModelLoadError as `download` and `read_values` do.
    """
    for place in find_own_adapters(read_values(folder) or {}, Path()).values():
        if place != Path():
            download(repository, [str(place / name) for name in _FILES], ())
