"""Cross-attention of recorded decodes to images, whose keys and values lie in pages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from tgi_trio.shard.torch_backend.attention.interface import AttentionBackend, AttentionLayer
from tgi_trio.shard.torch_backend.layers.attention.cross_attention import CrossLayer


@dataclass(frozen=True, slots=True, eq=False)
class PagedCrossTokens:
    """A `CrossTokens` of decodes that reads only tensors that do not move.

    All tokens are computed. One that sees no image attends to a null block, and the result is
    multiplied by zero.
    """

    attention: AttentionBackend
    batch: Any  # the attention's, over the pages
    kv_heads: int
    seeing: torch.Tensor  # [T, 1]: 1 for tokens that see an image, else 0
    feeds: bool  # the MLP's output counts for all tokens

    def cast(self, dtype: torch.dtype) -> PagedCrossTokens:
        """Return it for hidden states of `dtype`."""
        return replace(self, seeing=self.seeing.to(dtype))

    def pick(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def attend(self, layer: CrossLayer, query: torch.Tensor) -> torch.Tensor:
        own = AttentionLayer(
            index=layer.number,
            heads=layer.heads,
            kv_heads=self.kv_heads,
            head_dim=layer.head_dim,
            scale=layer.scale,
            reads_only=True,
        )
        none = query[:, :0]
        return self.attention.attend(own, query, none, none, self.batch)

    def show(self, attended: torch.Tensor) -> torch.Tensor:
        return attended * self.seeing

    def feed(self, found: torch.Tensor) -> torch.Tensor:
        return found if self.feeds else found * self.seeing

    def place(self, x: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        return own
