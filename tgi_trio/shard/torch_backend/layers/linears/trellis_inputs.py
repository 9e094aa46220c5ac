"""Inputs of products with EXL3's matrices, and a library's products with what is written for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch

from tgi_trio.model.quantised.exl3_layout import TURNED
from tgi_trio.shard.torch_backend.layers.activation import Activation
from tgi_trio.shard.torch_backend.layers.gating import describe_opening
from tgi_trio.shard.torch_backend.layers.linears.stored_trellis import Trellis
from tgi_trio.shard.torch_backend.layers.linears.trellis_tiles import (
    TURN_WARPS,
    TURNED_ROWS,
    WRITTEN,
    WRITTEN_STEPS,
)

_SCRATCH: Final = 256 << 20  # bytes of numbers that are written at a time


class TurnedInputs:
    """The inputs of a linear layer, turned in one launch for all of its matrices."""

    __slots__ = ("_inputs", "_opening", "_scales", "_turned", "_x")

    def __init__(
        self, x: torch.Tensor, inputs: int, scales: torch.Tensor, act: Activation | None = None
    ) -> None:
        """`x`: [rows, inputs], contiguous, or that of which `act` makes them, in the same launch.

        `scales`: float16 [sorts, padded]. Raises ValueError for an activation that no kernel has.
        """
        opening = describe_opening(act)
        if opening is None:
            raise ValueError(f"no kernel does what {act} does")
        self._x = x
        self._inputs = inputs
        self._scales = scales
        self._opening = opening
        self._turned: torch.Tensor | None = None

    def turn(self) -> torch.Tensor:
        """Return the rows, scaled in each way and turned, [sorts, rows, padded]."""
        from tgi_trio.shard.torch_backend.kernels.linears.trellis_inputs import (
            turn_inputs,  # Triton
        )

        if self._turned is None:
            self._turned = self._make_room()
            sorts, padded = self._scales.shape
            turn_inputs[(-(-len(self._x) // TURNED_ROWS), padded // TURNED, sorts)](
                *self._arguments(self._turned), **self._constants(), num_warps=TURN_WARPS
            )
        return self._turned

    def turn_and_write(
        self, part: Trellis, first: int, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the same, and weights for turned inputs [outputs, padded], in one launch.

        The weights are those of `count` blocks from `first` on, in the dtype of the inputs.
        """
        from tgi_trio.shard.torch_backend.kernels.linears.trellis_inputs import (
            turn_and_write,  # Triton
        )

        form, turning = part.form, 0
        writing = count * -(-form.padded // (WRITTEN.depth * WRITTEN_STEPS))
        weight = self._x.new_empty((count * TURNED, form.padded))
        if self._turned is None:
            self._turned = self._make_room()
            runs = self._scales.numel() // TURNED
            turning = -(-len(self._x) // TURNED_ROWS) * runs
        turn_and_write[(writing + turning,)](
            *self._arguments(self._turned),
            *(weight, part.rings, part.output_scales, first, count, writing),
            **self._constants(),
            HALF_BITS=form.half_bits,
            BOOK=form.book,
            DEPTH=WRITTEN.depth,
            STEPS=WRITTEN_STEPS,
            num_warps=WRITTEN.warps,
            num_stages=WRITTEN.stages,
        )
        return self._turned, weight

    def _make_room(self) -> torch.Tensor:
        sorts, padded = self._scales.shape
        return self._x.new_empty((sorts, len(self._x), padded))

    def _arguments(self, turned: torch.Tensor) -> tuple[Any, ...]:
        limit, scale, _ = self._opening
        sizes = len(self._x), self._inputs, self._scales.shape[1]
        return turned, self._x, self._scales, limit, scale, *sizes

    def _constants(self) -> dict[str, Any]:
        return {"ROWS": TURNED_ROWS, **self._opening.constants}


class _Product(NamedTuple):
    """A library's product with some outputs: one, or as large ones of neighbouring sorts."""

    sorts: slice
    outputs: slice


def write_and_multiply(
    out: torch.Tensor, inputs: TurnedInputs, sorts: slice, part: Trellis, bias: torch.Tensor | None
) -> None:
    """Write x W^T + b to `out` [rows, outputs]: W is written as numbers, for a library.

    As many outputs at a time as scratch memory holds. `sorts`: the part's, among those of `inputs`.
    """
    each = TURNED * max(1, _SCRATCH // (TURNED * part.form.padded * out.element_size()))
    for first in range(0, part.outputs, each):
        last = min(first + each, part.outputs)
        turned, weight = inputs.turn_and_write(part, first // TURNED, -(-(last - first) // TURNED))
        for product in list_products(part.counts, first, last, together=bias is None):
            begin, end = product.outputs.start - first, product.outputs.stop - first
            own = None if bias is None else bias[product.outputs]
            rows = turned[sorts][product.sorts]
            _multiply(out[:, product.outputs], rows, weight[begin:end], own)
        del weight  # its memory is free for the next one


def list_products(
    counts: Sequence[int], first: int, last: int, *, together: bool
) -> Iterator[_Product]:
    """Yield the products for outputs from `first` to `last`, given how many each sort has.

    `together`: neighbouring sorts of equally many outputs are multiplied at once.
    """
    found: list[_Product] = []
    end = 0
    for sort, count in enumerate(counts):
        begin, end = end, end + count
        own = slice(max(first, begin), min(last, end))
        if own.start >= own.stop:
            continue
        before = found[-1] if found else None
        if before is not None and together:
            size = before.outputs.stop - before.outputs.start
            if size == (own.stop - own.start) * (before.sorts.stop - before.sorts.start):
                found[-1] = _Product(
                    slice(before.sorts.start, sort + 1), slice(before.outputs.start, own.stop)
                )
                continue
        found.append(_Product(slice(sort, sort + 1), own))
    yield from found


def _multiply(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Write the products of `x` [N, rows, padded] with N matrices that lie below one another.

    `out`: [rows, outputs]; `weight`: [outputs, padded]; with a bias, N is 1.
    """
    if bias is not None:
        torch.addmm(bias, x[0], weight.T, out=out)
    elif len(x) == 1:
        torch.mm(x[0], weight.T, out=out)
    else:
        matrices = weight.unflatten(0, (len(x), -1)).transpose(1, 2)
        torch.bmm(x, matrices, out=out.unflatten(1, (len(x), -1)).transpose(0, 1))
