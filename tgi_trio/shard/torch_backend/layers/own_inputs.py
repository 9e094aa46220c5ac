"""Per-layer embeddings: every layer has embeddings of its own for each token (Gemma 3n, 2025).

Source: transformers' Gemma 3n and 4, "per-layer inputs".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tgi_trio.model.specs.decoder import OwnInputsSpec
from tgi_trio.shard.torch_backend.layers.activation import Activation
from tgi_trio.shard.torch_backend.layers.gating import open_own
from tgi_trio.shard.torch_backend.layers.linear import Linear
from tgi_trio.shard.torch_backend.layers.norm import Norm
from tgi_trio.shard.torch_backend.layers.vocabulary import Gathering, embed
from tgi_trio.shard.torch_backend.step_features import StepFeatures

_BOTH = 2.0**-0.5  # factor of a sum of two


@dataclass(frozen=True, slots=True, eq=False)
class OwnInputs:
    """The part that all layers share."""

    spec: OwnInputsSpec
    table: torch.Tensor  # [rows of `part`, layers * width]
    part: slice  # the rows that this rank has
    projection: Linear  # [layers * width, hidden]
    norm: Norm  # over one layer's width

    def hide(self, token_ids: torch.Tensor, features: StepFeatures) -> torch.Tensor:
        """Return token ids [T] with a neutral token in the places of image features."""
        return token_ids.index_fill(0, features.places, self.spec.image_token)

    def of(self, token_ids: torch.Tensor, x: torch.Tensor, ranks: Gathering | None) -> torch.Tensor:
        """Return [layers, T, width] for token ids [T], whose embeddings are `x` [T, hidden]."""
        width, beyond = self.spec.width, token_ids >= self.spec.rows
        rows = embed(token_ids.masked_fill(beyond, 0), self.table, self.part, ranks)
        rows = rows * torch.tensor(width**0.5, dtype=rows.dtype)  # the factor is rounded first
        projected = self.projection(x) * x.shape[-1] ** -0.5
        projected = self.norm(projected.unflatten(-1, (-1, width)))
        both: torch.Tensor = (projected + rows.unflatten(-1, (-1, width))) * _BOTH
        return both.transpose(0, 1)

    def nbytes(self) -> int:
        return self.table.nbytes + self.projection.nbytes() + self.norm.nbytes()


@dataclass(frozen=True, slots=True, eq=False)
class OwnInput:
    """One layer's part. `post_norm`, of the result, is applied by the caller."""

    gate: Linear
    act: Activation
    up: Linear
    post_norm: Norm

    def __call__(self, x: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Return [T, hidden] for `x` [T, hidden] and the layer's embeddings `own` [T, width]."""
        return self.up(open_own(self.gate(x), own, self.act))

    def pack(self) -> None:
        self.gate.pack()
        self.up.pack()

    def nbytes(self) -> int:
        return self.gate.nbytes() + self.up.nbytes() + self.post_norm.nbytes()
