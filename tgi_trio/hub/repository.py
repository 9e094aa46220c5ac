"""A repository of the hub, and the token to read it with."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tgi_trio.errors import ModelLoadError

_TOKEN_VARIABLES: Final = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_API_TOKEN")


@dataclass(frozen=True, kw_only=True)
class Repository:
    """What is to be downloaded, and how."""

    name: str  # owner/name
    revision: str | None = None  # branch, tag, commit or refs/pr/N; None: main
    cache_dir: Path | None = None  # None: huggingface_hub's
    token: str | None = None  # None lets huggingface_hub use a stored login
    progress: bool = True  # bars on stderr
    flag: str = "--model-id"  # which names it, for errors


def hub_token(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the first token that is set in the environment, without the space around it.

    What writes variables from files often leaves a line's end in them. Raises ModelLoadError for a
    token that no header can carry; the text does not have it.
    """
    for name in _TOKEN_VARIABLES:
        if token := environ.get(name, "").strip():
            if not (token.isascii() and token.isprintable()):
                raise ModelLoadError(f"{name} is no token: it has letters beyond printable ASCII")
            return token
    return None
