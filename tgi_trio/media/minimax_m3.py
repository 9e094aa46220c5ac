"""MiniMax-M3: the limits of an image's size, for who counts its tokens and who makes its pixels.

Source: `transformers`' image processor of this family.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

# Least and most pixels of a whole image.
_DEFAULT: Final = {"shortest_edge": 4 * 28 * 28, "longest_edge": 451_584}


def limit_size(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an image processor with limits as `size`.

    A `size` of two numbers, which the published checkpoint has, is not read.
    """
    size = settings.get("size")
    limits = dict(size) if isinstance(size, Mapping) else dict(_DEFAULT)
    for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        if settings.get(name) is not None:
            limits[edge] = settings[name]
    return {**settings, "size": limits}
