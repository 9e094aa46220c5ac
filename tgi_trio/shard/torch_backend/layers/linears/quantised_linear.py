"""Linear layers whose weights stay quantised, and are dequantised in every call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from tgi_trio.shard.checkpoint.unpacked import UnpackedMatrix
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.layers.linears.plain_product import multiply_plain

# Numbers that are dequantised at a time on a CPU, so that they stay in its cache.
_AT_ONCE = 1 << 20


class QuantisedWeight:
    """A matrix [outputs, inputs] as codes, scales and lows; see `unpacked.py`."""

    __slots__ = ("_codes", "_lows", "_order", "_packed", "_scales", "_table", "shape")

    def __init__(self, parts: UnpackedMatrix, device: torch.device) -> None:
        """Copy the parts to `device`; codes of 4 bits are stored two to a byte."""
        self.shape = parts.codes.shape
        codes = torch.from_numpy(parts.codes)
        inputs = self.shape[1]
        self._packed = bool(inputs % 2 == 0 and codes.dtype == torch.uint8 and codes.max() < 16)
        if self._packed:
            codes = codes[:, : inputs // 2] | codes[:, inputs // 2 :] << 4
        self._codes = codes.contiguous().to(device)
        self._scales = torch.from_numpy(parts.scales).contiguous().to(device)
        self._lows = None if parts.lows is None else torch.from_numpy(parts.lows).to(device)
        self._table = None if parts.table is None else torch.from_numpy(parts.table).to(device)
        self._order = None if parts.order is None else torch.from_numpy(parts.order).to(device)

    def numbers(self, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        """Return some rows, dequantised: [rows, inputs], computed in float32, then of `dtype`."""
        codes = self._codes[rows]
        if self._packed:
            codes = torch.cat((codes & 15, codes >> 4), dim=1)
        if self._table is None:
            values = codes.float()
        else:
            values = self._table.index_select(0, codes.flatten().int()).view(codes.shape)
        scales, lows = self._scales[rows], None if self._lows is None else self._lows[rows]
        if self._order is not None:
            values *= scales[:, self._order]
            return (values if lows is None else values - lows[:, self._order]).to(dtype)
        runs = values.view(*scales.shape, -1)
        runs *= scales[..., None]
        if lows is not None:
            runs -= lows[..., None]
        return values.to(dtype)

    @property
    def on_cpu(self) -> bool:
        return self._codes.device.type == "cpu"

    def nbytes(self) -> int:
        parts = (self._codes, self._scales, self._lows, self._table, self._order)
        return sum(part.nbytes for part in parts if part is not None)


class QuantisedLinear(Linear):
    """y = x W^T + b. W is several matrices stacked along the outputs; some may be plain."""

    __slots__ = ("_parts",)

    def __init__(
        self,
        parts: Sequence[QuantisedWeight | torch.Tensor],
        bias: torch.Tensor | None,
        *,
        invariant: bool = False,
    ) -> None:
        """`parts`: [outputs of each, inputs]; plain ones have the dtype of x.

        `invariant`: as for `Linear`.
        """
        some = next(part for part in parts if isinstance(part, QuantisedWeight))
        super().__init__(torch.empty(0, some.shape[1]), bias, invariant=invariant)
        self._parts = parts
        self._bytes += sum(
            part.nbytes() if isinstance(part, QuantisedWeight) else part.nbytes for part in parts
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        results = [
            multiply_plain(x, rows, None, invariant=self.invariant)
            for part in self._parts
            for rows in _numbers(part, x.dtype)
        ]
        whole = results[0] if len(results) == 1 else torch.cat(results, dim=-1)
        return whole if self.bias is None else whole + self.bias

    def pack(self) -> None:
        """Nothing: there is no weight to reorder."""


def _numbers(part: QuantisedWeight | torch.Tensor, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yield a part's rows, dequantised: some at a time on a CPU, all at once on a device."""
    if isinstance(part, torch.Tensor):
        yield part
        return
    rows, inputs = part.shape
    step = max(1, _AT_ONCE // inputs) if part.on_cpu else rows
    for begin in range(0, rows, step):
        yield part.numbers(slice(begin, begin + step), dtype)
