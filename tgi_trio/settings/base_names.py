"""Names that clients of HF's libraries send when they mean "the model you serve"."""

from __future__ import annotations

from typing import Final

BASE_NAMES: Final = frozenset({"tgi", "dummy"})


def names_base(name: str) -> bool:
    """Whether a client that names this model means the one that is served, whichever it is.

    The JavaScript package @huggingface/inference names the address of the server.
    """
    return name in BASE_NAMES or name.startswith(("http://", "https://"))
