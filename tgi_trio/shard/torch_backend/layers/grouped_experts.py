"""All experts of a layer at once on a device, without asking it who was chosen.

(token, expert) pairs are sorted by expert, and each of the two products is one launch over all of
them (`kernels/grouped.py`). The loop over experts, which needs to know on the host which ones were
chosen, is a wait per layer and a handful of launches per expert.
"""

from __future__ import annotations

import torch

from tgi_trio.shard.torch_backend.kernels.grouped import multiply_groups
from tgi_trio.shard.torch_backend.layers.activation import Activation
from tgi_trio.shard.torch_backend.layers.linear import Linear

_FEW, _MANY = 16, 64  # rows of a tile: the least that tensor cores take, and for long prefills
_MANY_FROM = 32  # pairs per expert
_OUTPUTS, _DEPTH = 64, 64


class GroupedExperts:
    """All of `DenseMlp`'s `up` [experts, inner, hidden] and `down` [experts, hidden, ...]."""

    def __init__(self, up: Linear, down: Linear, act: Activation) -> None:
        """Weights and biases [experts, outputs] contiguous, on the device."""
        self._up = up
        self._down = down
        self._act = act

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        """Return [T, hidden] of `x` [T, hidden]: the weighted sum of each token's experts.

        `weights` of x's dtype and `chosen` int64, both [T, per token].
        """
        tokens, each = chosen.shape
        count = len(self._up.weight)
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        experts = torch.arange(count, device=x.device)
        counts = (flat[:, None] == experts).sum(0)
        many = x.dtype.itemsize < 4 and tokens * each >= _MANY_FROM * count
        rows = _MANY if many else _FEW
        ends, tile_ends = counts.cumsum(0), ((counts + rows - 1) // rows).cumsum(0)
        tiles = min(tokens * each, count + tokens * each // rows)
        inner = self._multiply(x, self._up, order, ends, tile_ends, tiles, rows, each, gathers=True)
        inner = self._act(inner).contiguous()
        parts = self._multiply(
            inner, self._down, order, ends, tile_ends, tiles, rows, each, gathers=False
        )
        return (parts.view(tokens, each, -1) * weights[:, :, None]).sum(1)

    def _multiply(
        self,
        x: torch.Tensor,
        linear: Linear,
        order: torch.Tensor,
        ends: torch.Tensor,
        tile_ends: torch.Tensor,
        tiles: int,
        rows: int,
        each: int,
        *,
        gathers: bool,
    ) -> torch.Tensor:
        """Return [pairs, outputs] of one product; see `multiply_groups`."""
        weight, bias = linear.weight, linear.bias
        groups, outputs, depth = weight.shape
        out = torch.empty((len(order), outputs), dtype=x.dtype, device=x.device)
        multiply_groups[(tiles, -(-outputs // _OUTPUTS))](
            out,
            x,
            weight,
            weight if bias is None else bias,
            order,
            ends,
            tile_ends,
            len(order),
            N=outputs,
            K=depth,
            GROUPS=groups,
            PADDED_GROUPS=1 << (groups - 1).bit_length(),
            PER_ROW=each,
            GATHERS=gathers,
            HAS_BIAS=bias is not None,
            ROWS=rows,
            OUTPUTS=_OUTPUTS,
            DEPTH=_DEPTH if x.dtype.itemsize < 4 else _DEPTH // 2,
        )
        return out
