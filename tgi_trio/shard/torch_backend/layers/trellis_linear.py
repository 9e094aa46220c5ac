"""Linear layers on a device whose weights stay EXL3's: kernels multiply by the rings of tiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

from tgi_trio.model.quantised.exl3_layout import TURNED
from tgi_trio.shard.torch_backend.batch_invariance import apparent_rows
from tgi_trio.shard.torch_backend.compiling.ahead import compile_beside
from tgi_trio.shard.torch_backend.layers.linear import Linear
from tgi_trio.shard.torch_backend.layers.plain_product import multiply_plain
from tgi_trio.shard.torch_backend.layers.stored_trellis import Trellis, join_trellises
from tgi_trio.shard.torch_backend.layers.trellis_tiles import (
    FEW,
    TURN_WARPS,
    TURNED_ROWS,
    WRITTEN,
    WRITTEN_STEPS,
    TrellisTile,
    choose_trellis_tiles,
    count_few_warps,
)
from tgi_trio.shard.torch_backend.torch_device import generation

_SCRATCH: Final = 256 << 20  # bytes of numbers that are written at a time
# A block is divided among programs (split-K) while there are fewer than these.
_PROGRAMS = 512
_MOST_PARTS: Final = 16
_ONE: Final = 0x3F800000  # the bits of 1.0


class TrellisLinear(Linear):
    """y = x W^T + b. W is several matrices stacked along the outputs; some may be plain."""

    __slots__ = ("_inputs", "_parts", "_scales", "outputs")

    def __init__(
        self,
        parts: Sequence[Trellis | torch.Tensor],
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
        *,
        invariant: bool = False,
    ) -> None:
        """`parts`: [outputs of each, inputs], on the host or the device, at least one of EXL3.

        Plain ones are of `dtype`, as is x. `invariant`: as for `Linear`.
        """
        self._parts: list[Trellis | torch.Tensor] = []
        for part in parts:
            last = self._parts[-1] if self._parts else None
            if isinstance(part, Trellis) and isinstance(last, Trellis):
                self._parts[-1:] = join_trellises([last, part])
            else:
                self._parts.append(part)
        self._parts = [part.to(device) for part in self._parts]
        stored = [part for part in self._parts if isinstance(part, Trellis)]
        # How each sort of all matrices scales its inputs: one launch turns them for all.
        self._scales = torch.cat([part.input_scales for part in stored])
        self._inputs = stored[0].form.inputs
        self.outputs = sum(map(_outputs_of, self._parts))
        nothing = torch.empty((0, self._inputs), dtype=dtype, device=device)
        super().__init__(nothing, bias, invariant=invariant)
        blocks = max(len(part.sorts) for part in stored)
        self.arrived = torch.zeros(blocks, dtype=torch.int32, device=device)
        self._bytes += sum(part.nbytes for part in self._parts if isinstance(part, torch.Tensor))
        self._bytes += sum(part.nbytes() for part in stored)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        shape = x.shape[:-1]
        x = x.reshape(-1, self._inputs).contiguous()
        out = torch.empty((len(x), self.outputs), dtype=x.dtype, device=x.device)
        if not len(x):
            return out.view(*shape, self.outputs)
        few, tile = self._choose(apparent_rows(len(x), invariant=self.invariant))
        turned = x if few else turn_rows(x, self._scales)
        for place, part, bias, sorts in self._pieces():
            if isinstance(part, torch.Tensor):
                out[:, place] = multiply_plain(x, part, bias, invariant=self.invariant)
            elif few is not None:
                self._launch_few(out[:, place], x, part, bias, few)
            elif tile is None:
                write_and_multiply(out[:, place], turned[sorts], part, bias)
            else:
                for first in range(0, len(x), tile.rows):
                    some = slice(first, first + tile.rows)
                    self._launch(out[some, place], turned[sorts, some], part, bias, tile)
        return out.view(*shape, self.outputs)

    @property
    def lone(self) -> Trellis | None:
        """The matrix of all outputs; None if there are several."""
        (first, *more) = self._parts
        return first if isinstance(first, Trellis) and not more else None

    def pack(self) -> None:
        """Start compiling the kernels for all numbers of rows."""
        parts = (p if isinstance(p, Trellis) else len(p) for p in self._parts)
        sorts = [(p.form, p.outputs) if isinstance(p, Trellis) else p for p in parts]
        kind = ("trellis", self.weight.dtype, self.bias is None, *sorts)
        compile_beside(self.weight.device, self._launch_each, kind)

    def _choose(self, rows: int) -> tuple[int | None, TrellisTile | None]:
        """Return how `rows` are multiplied: as so few, in a tile, or else by a library."""
        few = next((few for few in FEW if rows <= few), None)
        tiles = choose_trellis_tiles(self.weight.dtype, generation(self.weight.device))
        any_rows = tiles[-1] if self.weight.dtype.itemsize > 2 else None
        return few, next((tile for tile in tiles if rows <= tile.rows), any_rows)

    def _launch_each(self) -> None:
        """Launch one program of every kernel variant that some number of rows uses."""
        tiles = choose_trellis_tiles(self.weight.dtype, generation(self.weight.device))
        ways = {
            self._choose(apparent_rows(rows, invariant=self.invariant))
            for rows in (*FEW, *(tile.rows for tile in tiles), tiles[-1].rows + 1)
        }
        x = self.weight.new_zeros((tiles[-1].rows, self._inputs))
        turned = turn_rows(x, self._scales)
        out = self.weight.new_empty((len(x), self.outputs))
        for place, part, bias, sorts in self._pieces():
            if isinstance(part, torch.Tensor):
                continue
            for few, tile in ways:
                if few is not None:
                    self._launch_few(out[:few, place], x[:few], part, bias, few, only_one=True)
                elif tile is not None:
                    own = out[: tile.rows, place], turned[sorts, : tile.rows], part, bias, tile
                    self._launch(*own, only_one=True)
                else:
                    write_blocks(part, 0, 1, self.weight.dtype)

    def _pieces(
        self,
    ) -> Iterator[tuple[slice, Trellis | torch.Tensor, torch.Tensor | None, slice]]:
        """Yield for each matrix: its outputs, itself, its bias, its sorts among all of them."""
        end = last = 0
        for part in self._parts:
            begin, end = end, end + _outputs_of(part)
            first, last = last, last + (len(part.counts) if isinstance(part, Trellis) else 0)
            bias = None if self.bias is None else self.bias[begin:end]
            yield slice(begin, end), part, bias, slice(first, last)

    def _launch_few(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        part: Trellis,
        bias: torch.Tensor | None,
        few: int,
        *,
        only_one: bool = False,
    ) -> None:
        """Multiply a few rows; `only_one`: launch a single program, to compile the kernel."""
        from tgi_trio.shard.torch_backend.kernels.trellis_products import (  # Triton
            multiply_turned_few,
        )

        grid, sums, constants = self._prepare(x, part, bias, few)
        multiply_turned_few[(1, 1) if only_one else grid](
            out,
            sums,
            self.arrived,
            x,
            part.rings,
            part.input_scales,
            part.sorts,
            part.output_scales,
            x if bias is None else bias,
            len(x),
            part.outputs,
            self._inputs,
            part.form.padded,
            out.stride(0),
            **constants,
            num_warps=count_few_warps(few, part.form.half_bits),
        )

    def _launch(
        self,
        out: torch.Tensor,
        turned: torch.Tensor,
        part: Trellis,
        bias: torch.Tensor | None,
        tile: TrellisTile,
        *,
        only_one: bool = False,
    ) -> None:
        """Multiply `turned` rows [sorts, rows, padded], no more than a tile has."""
        from tgi_trio.shard.torch_backend.kernels.trellis_products import multiply_turned

        grid, sums, constants = self._prepare(turned, part, bias, tile.rows)
        multiply_turned[(1, 1) if only_one else grid](
            out,
            sums,
            self.arrived,
            turned,
            part.rings,
            part.sorts,
            part.output_scales,
            turned if bias is None else bias,
            len(out),
            turned.stride(0) // part.form.padded,
            part.outputs,
            part.form.padded,
            out.stride(0),
            _ONE,
            **constants,
            DEPTH=tile.depth,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )

    def _prepare(
        self, like: torch.Tensor, part: Trellis, bias: torch.Tensor | None, rows: int
    ) -> tuple[tuple[int, int], torch.Tensor, dict[str, Any]]:
        """Return a product's grid, memory for partial sums, and constants."""
        blocks = len(part.sorts)
        parts = count_parts(blocks, part.form.padded // TURNED)
        found = blocks * parts * rows * TURNED if parts > 1 else 1
        sums = torch.empty(found, dtype=torch.float32, device=like.device)
        constants = {
            "HALF_BITS": part.form.half_bits,
            "BOOK": part.form.book,
            "HAS_BIAS": bias is not None,
            "DIVIDED": parts > 1,
            "ROWS": rows,
        }
        return (blocks, parts), sums, constants


def _outputs_of(part: Trellis | torch.Tensor) -> int:
    return part.outputs if isinstance(part, Trellis) else len(part)


def count_parts(blocks: int, runs: int) -> int:
    """Return how many programs share a block's runs of inputs (split-K), each with one at least."""
    parts = max(1, min(_PROGRAMS // blocks, runs, _MOST_PARTS))
    return -(-runs // -(-runs // parts))


def turn_rows(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return rows [rows, inputs] as `turn_inputs` turns them, [sorts, rows, padded].

    `scales`: float16 [sorts, padded].
    """
    from tgi_trio.shard.torch_backend.kernels.trellis_products import turn_inputs  # Triton

    (sorts, padded), (rows, inputs) = scales.shape, x.shape
    turned = x.new_empty((sorts, rows, padded))
    turn_inputs[(-(-rows // TURNED_ROWS), padded // TURNED, sorts)](
        turned, x, scales, rows, inputs, padded, ROWS=TURNED_ROWS, num_warps=TURN_WARPS
    )
    return turned


def write_and_multiply(
    out: torch.Tensor, turned: torch.Tensor, part: Trellis, bias: torch.Tensor | None
) -> None:
    """Write x W^T + b to `out` [rows, outputs]: W is written as numbers, for a library.

    As many outputs at a time as scratch memory holds. `turned`: as `turn_rows` returns it.
    """
    each = TURNED * max(1, _SCRATCH // (TURNED * part.form.padded * turned.itemsize))
    for first in range(0, part.outputs, each):
        last, end = min(first + each, part.outputs), 0
        weight = write_blocks(part, first // TURNED, -(-(last - first) // TURNED), turned.dtype)
        for rows, count in zip(turned, part.counts, strict=True):
            begin, end = max(first, end), end + count
            if begin < min(last, end):
                some = slice(begin, min(last, end))
                own = weight[some.start - first : some.stop - first].T
                if bias is None:
                    torch.mm(rows, own, out=out[:, some])
                else:
                    torch.addmm(bias[some], rows, own, out=out[:, some])
        del weight, own  # their memory is free for the next ones


def write_blocks(part: Trellis, first: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return weights for turned inputs of `count` blocks from `first` on, [outputs, padded]."""
    from tgi_trio.shard.torch_backend.kernels.written_trellis import write_trellis  # Triton

    padded, form = part.form.padded, part.form
    weight = torch.empty((count * TURNED, padded), dtype=dtype, device=part.rings.device)
    write_trellis[(count, -(-padded // (WRITTEN.depth * WRITTEN_STEPS)))](
        weight,
        part.rings,
        part.output_scales,
        first,
        padded,
        HALF_BITS=form.half_bits,
        BOOK=form.book,
        DEPTH=WRITTEN.depth,
        STEPS=WRITTEN_STEPS,
        num_warps=WRITTEN.warps,
        num_stages=WRITTEN.stages,
    )
    return weight
