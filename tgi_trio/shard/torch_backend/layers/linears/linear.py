"""Linear layers, with weights packed for oneDNN where that is faster."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tgi_trio.shard.torch_backend.layers.activation import Activation
from tgi_trio.shard.torch_backend.layers.gating import activate
from tgi_trio.shard.torch_backend.layers.linears.plain_product import multiply_plain

# A float32 weight of fewer elements is read from the cache, where torch's own call is cheaper.
_PACK_FROM = 1 << 19


class Linear:
    """y = x W^T + b. `weight` [out, in], `bias` [out] or None."""

    __slots__ = (
        *("_bytes", "arrived", "bias", "few_rows", "fused", "invariant", "other_share", "packed"),
        *("turned", "weight"),
    )

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, invariant: bool = False
    ) -> None:
        """`invariant`: results do not depend on the number of rows; see `batch_invariance.py`."""
        self.weight = weight
        self.bias = bias
        self.invariant = invariant
        self.packed: torch.Tensor | None = None
        # By number of rows: the product that is faster than the library's, and the numbers of rows
        # for which its launch includes the norm before it and the gate after it; see `few_rows.py`.
        self.few_rows: dict[int, Callable[[Linear, torch.Tensor], torch.Tensor]] = {}
        self.fused: frozenset[int] = frozenset()
        # Numbers of rows for which its launch rotates heads and writes K and V; `few_heads.py`.
        self.turned: frozenset[int] = frozenset()
        # Whether programs have the other share of the matrix for one row; see `lone_shares.py`.
        self.other_share = False
        self.arrived: torch.Tensor | None = None  # int32 [tiles]: counters for split-K
        self._bytes = weight.nbytes + (bias.nbytes if bias is not None else 0)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.few_rows and (multiply := self.few_rows.get(x.shape[:-1].numel())):
            return multiply(self, x)
        if self.packed is None:
            return multiply_plain(x, self.weight, self.bias, invariant=self.invariant)
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.packed, self.bias, "none", [], ""
        )
        return result

    def opens(self, act: Activation) -> bool:
        """Return whether `multiply_opened` can take fewer launches than one after the other."""
        return False

    def multiply_opened(self, inner: torch.Tensor, act: Activation) -> torch.Tensor:
        """Return the product with act(inner); `inner` [.., inputs], or twice as many of gates."""
        return self(activate(act, inner))

    def pack(self) -> None:
        """Reorder the weight for oneDNN on a CPU that gains by it; `weight` is then empty.

        For few rows torch's call leaves half of the memory bandwidth unused; the packed one does
        not. The operators are private to torch, so a build without them keeps the plain weight.
        """
        if self.packed is not None or not _worth_packing(self.weight):
            return
        try:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.contiguous(), None)
        except (RuntimeError, AttributeError, TypeError):
            return
        # Not a view of no rows, which would keep all of its memory.
        self.weight = self.weight.new_empty(0, self.weight.shape[1])

    def nbytes(self) -> int:
        return self._bytes


class WrappedLinear(Linear):
    """A linear that adds something to another one's product, and shares its weights."""

    __slots__ = ("base",)

    def __init__(self, base: Linear) -> None:
        super().__init__(base.weight, base.bias, invariant=base.invariant)
        self.base = base

    def pack(self) -> None:
        self.base.pack()
        self.weight = self.base.weight

    def nbytes(self) -> int:
        return self.base.nbytes()


def _worth_packing(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32 and weight.numel() >= _PACK_FROM
