"""transformers' Hunyuan VL, with what its class does otherwise than the code it was published with.

Tencent's code (transformers at their commit 82a06db, `apply_rotary_pos_emb_xdrope`) repeats the
list of sections for the second half of a head, as vLLM's `XDRotaryEmbedding` has a section for each
pair. transformers 5.24 doubles each section instead, so that the two numbers of a pair turn by
different parts of a position, which is no rotation.
"""

from __future__ import annotations

from typing import Any

import torch


def turn_in_pairs(model: Any) -> None:
    """Have both numbers of each pair turn by the same part of a position."""
    rotary = model.model.language_model.rotary_emb

    def compose(angles: torch.Tensor) -> torch.Tensor:
        """Return [batch, T, dim] of each part's own [parts, batch, T, dim / 2]."""
        runs = angles.split(rotary.mrope_section, dim=-1)
        half = torch.cat([run[part] for part, run in enumerate(runs)], dim=-1)
        return torch.cat((half, half), dim=-1)

    rotary.recomposition_frequencies = compose
