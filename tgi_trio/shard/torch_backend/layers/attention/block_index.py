"""A layer's block index, which selects the blocks of tokens that a token attends to."""

from __future__ import annotations

import torch

from tgi_trio.model.specs.block_index import BlockIndexSpec
from tgi_trio.shard.torch_backend.layers.attention.rotary import Rotary, RotaryTable
from tgi_trio.shard.torch_backend.layers.norm import Norm


class BlockIndex:
    """Computes keys and queries of a layer's block index."""

    __slots__ = ("heads", "key_norm", "number", "query_norm", "spec")

    def __init__(
        self, spec: BlockIndexSpec, *, heads: int, query_norm: Norm, key_norm: Norm, number: int
    ) -> None:
        """`heads`: those of this rank; `number`: of the layer of the KV cache with its keys."""
        self.spec = spec
        self.heads = heads
        self.number = number
        self.query_norm = query_norm
        self.key_norm = key_norm

    def split(self, projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what is before the index in `projected` [T, width], its queries, and its key."""
        own = (self.heads * self.spec.dim, self.spec.dim)
        before, queries, key = projected.split((projected.shape[-1] - sum(own), *own), dim=-1)
        return before, queries, key

    def keys(
        self, projected: torch.Tensor, rotary: Rotary | None, table: RotaryTable | None
    ) -> torch.Tensor:
        """Return index keys [T, 1, dim] of `projected` [T, dim]."""
        return _turn(self.key_norm(projected)[:, None], rotary, table)

    def queries(
        self, projected: torch.Tensor, rotary: Rotary | None, table: RotaryTable | None
    ) -> torch.Tensor:
        """Return queries, float32 [T, heads, dim], of `projected` [T, heads * dim]."""
        heads = projected.unflatten(-1, (self.heads, self.spec.dim))
        return _turn(self.query_norm(heads), rotary, table).float()

    def nbytes(self) -> int:
        return self.query_norm.nbytes() + self.key_norm.nbytes()


def _turn(x: torch.Tensor, rotary: Rotary | None, table: RotaryTable | None) -> torch.Tensor:
    return x if rotary is None or table is None else rotary.apply(x, table.cos, table.sin)


def score_blocks(scores: torch.Tensor, reach: torch.Tensor, spec: BlockIndexSpec) -> torch.Tensor:
    """Return the scores of blocks [N, heads, blocks] for those of tokens [N, heads, K].

    `reach` int64 [N, 1]: the last position that each of the N tokens sees. K is a multiple of the
    blocks' size. Blocks that a token does not see have -inf, its last ones inf.
    """
    positions = torch.arange(scores.shape[-1], device=scores.device)
    seen = scores.masked_fill((positions > reach)[:, None], float("-inf"))
    best: torch.Tensor = seen.unflatten(-1, (-1, spec.size)).amax(dim=-1)
    if spec.local:
        last = reach // spec.size - torch.arange(spec.local, device=scores.device)
        last = last.clamp(min=0)[:, None].expand(-1, scores.shape[1], -1)
        best.scatter_(-1, last, float("inf"))
    return best
