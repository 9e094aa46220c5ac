"""Linear layers, with weights packed for oneDNN where that is faster."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

# Below this many elements a float32 weight is read from cache, and torch's own call is cheaper.
_PACK_FROM = 1 << 19


class Linear:
    """y = x W^T + b. `weight` [out, in], `bias` [out] or None."""

    __slots__ = (
        *("_bytes", "arrived", "bias", "few_rows", "fused", "other_share", "packed", "turned"),
        "weight",
    )

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self.packed: torch.Tensor | None = None
        # What multiplies so many rows in less time than the library does, and of how many what lies
        # around the product is done in its launch; see `few_rows.py`.
        self.few_rows: dict[int, Callable[[Linear, torch.Tensor], torch.Tensor]] = {}
        self.fused: frozenset[int] = frozenset()
        # Of how many rows heads are rotated and written in its launch; see `few_heads.py`.
        self.turned: frozenset[int] = frozenset()
        # Whether programs of a lone row's product have another share of it; see `lone_shares.py`.
        self.other_share = False
        self.arrived: torch.Tensor | None = None  # int32 [tiles], with which programs share work
        self._bytes = weight.nbytes + (bias.nbytes if bias is not None else 0)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.few_rows and (multiply := self.few_rows.get(x.shape[:-1].numel())):
            return multiply(self, x)
        if self.packed is None:
            return functional.linear(x, self.weight, self.bias)
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.packed, self.bias, "none", [], ""
        )
        return result

    def pack(self) -> None:
        """Reorder the weight for oneDNN on a CPU that gains by it; `weight` is then given up.

        torch's call for few rows leaves half of the memory bandwidth unused; the packed one does
        not. The operators are private to torch, so a build without them keeps the plain weight.
        """
        if self.packed is not None or not _worth_packing(self.weight):
            return
        try:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.contiguous(), None)
        except (RuntimeError, AttributeError, TypeError):
            return
        # Not a view of none of its rows: that would hold all of its memory.
        self.weight = self.weight.new_empty(0, self.weight.shape[1])

    def nbytes(self) -> int:
        return self._bytes


class WrappedLinear(Linear):
    """A linear that computes what another one does, and more; its weights are the other's."""

    __slots__ = ("base",)

    def __init__(self, base: Linear) -> None:
        super().__init__(base.weight, base.bias)
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
