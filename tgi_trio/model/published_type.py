"""What the models of `published.py` have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

PUBLISHED_TYPE: Final = "published_type"  # the key under which the type is kept that a file says


class Pictures(NamedTuple):
    """How such a model's images are made: settings as in files of transformers' class."""

    image_processor: Mapping[str, Any]
    processor: Mapping[str, Any]
