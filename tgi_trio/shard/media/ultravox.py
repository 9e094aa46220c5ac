"""How Ultravox hears, piece by piece.

Its tower is Whisper's encoder, but that a sound may be shorter than 30 s, and silence behind it is
not heard. Source: fixie-ai's model. Without transformers, of which `ultravox_tower.py` is made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional


def encode_ultravox(model: Any, features: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the features of a sound's pieces, each heard by itself.

    `features` [pieces, bins, T], `mask` bool [pieces, T]. A feature is of as many rows of the tower
    as are stacked; where the last piece is filled up, its last one may have some of silence, which
    are computed but never seen by others, as in the model's own code.
    """
    heard = [
        model.multi_modal_projector(_hear(model, piece[None], int(own.sum())))[0]
        for piece, own in zip(features, mask, strict=True)
    ]
    return torch.cat(heard)


def _hear(model: Any, features: torch.Tensor, frames: int) -> torch.Tensor:
    """Return the stacked rows [1, N, stack * width] of a piece [1, bins, T] of so many frames."""
    tower = model.audio_tower
    rows = functional.gelu(tower.conv2(functional.gelu(tower.conv1(features)))).permute(0, 2, 1)
    seen = (frames - 1) // 2 + 1
    rows = rows[:, : -(-seen // model.stack) * model.stack]
    count = rows.shape[1]
    rows = rows + tower.embed_positions.weight[:count]
    silent = torch.arange(count, device=rows.device) >= seen
    hidden = rows.new_zeros(1, 1, count, count).masked_fill(silent, torch.finfo(rows.dtype).min)
    for layer in tower.layers:
        rows = layer(rows, hidden if count > seen else None)
    rows = functional.pad(tower.layer_norm(rows), (0, 0, 0, -count % model.stack))
    return rows.reshape(1, -1, model.stack * rows.shape[-1])
