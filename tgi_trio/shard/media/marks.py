"""Features of the marks around an image, in families that have such beside those of its patches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from tgi_trio.shard.media.features import Bundle

# Returns features [N, hidden] in the order of an image's tokens, from a model, what its
# `get_image_features` returns, and the image's bundle.
Mark = Callable[[Any, Any, Bundle], torch.Tensor]


def mark_gemma3n(model: Any, found: Any, bundle: Bundle) -> torch.Tensor:
    """Return an image's soft tokens and the mark behind them, which is of the tower's vocabulary.

    The mark before them is of the text's.
    """
    soft = found.pooler_output.flatten(0, -2)
    end = torch.tensor([model.config.eoi_token_id], device=soft.device)
    return torch.cat((soft, model.embed_vision(input_ids=end)))


def mark_ovis2(model: Any, found: Any, bundle: Bundle) -> torch.Tensor:
    """Return the tiles of an image, of which the whole is the first, between their marks."""
    whole, *tiles = found.pooler_output
    start, grid, column, row, end = found.visual_indicator_features[:, None]
    columns = int(bundle["grids"][0, 1])
    parts = [start, whole, grid]
    for i, tile in enumerate(tiles, start=1):
        between = end if i == len(tiles) else column if i % columns else row
        parts += [tile, between]
    return torch.cat(parts if tiles else [*parts, end])


# By `model_type`.
MARKS: Final[Mapping[str, Mark]] = {"gemma3n": mark_gemma3n, "ovis2": mark_ovis2}
