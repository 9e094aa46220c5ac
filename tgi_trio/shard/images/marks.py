"""Features of the marks around an image, in families that have such beside those of its patches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

# Returns features [N, hidden] in the order of an image's tokens, from a model, what its
# `get_image_features` returns, and the tower's inputs.
Mark = Callable[[Any, Any, Mapping[str, torch.Tensor]], torch.Tensor]


def mark_gemma3n(model: Any, found: Any, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return an image's soft tokens and the mark behind them, which is of the tower's vocabulary.

    The mark before them is of the text's.
    """
    soft = found.pooler_output.flatten(0, -2)
    end = torch.tensor([model.config.eoi_token_id], device=soft.device)
    return torch.cat((soft, model.embed_vision(input_ids=end)))


# By `model_type`.
MARKS: Final[Mapping[str, Mark]] = {"gemma3n": mark_gemma3n}
