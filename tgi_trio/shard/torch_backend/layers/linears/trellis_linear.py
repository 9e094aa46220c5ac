"""Linear layers on a device whose weights stay EXL3's: kernels multiply by the rings of tiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

from tgi_trio.model.quantised.exl3_layout import TURNED
from tgi_trio.shard.torch_backend.batch_invariance import apparent_rows
from tgi_trio.shard.torch_backend.compiling.ahead import compile_beside
from tgi_trio.shard.torch_backend.layers.activation import Activation
from tgi_trio.shard.torch_backend.layers.gating import describe_opening
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.layers.linears.plain_product import multiply_plain
from tgi_trio.shard.torch_backend.layers.linears.stored_trellis import (
    Trellis,
    join_below,
    join_trellises,
)
from tgi_trio.shard.torch_backend.layers.linears.trellis_inputs import (
    TurnedInputs,
    write_and_multiply,
)
from tgi_trio.shard.torch_backend.layers.linears.trellis_tiles import (
    FEW,
    MOST_ROWS,
    TrellisTile,
    choose_trellis_tiles,
    count_few_warps,
)
from tgi_trio.shard.torch_backend.torch_device import generation

# A block is divided among programs (split-K) while there are fewer than these. Of more rows than
# `_FULL_ROWS`, fewer programs fill a device; so sums take at most 16 MiB.
_PROGRAMS = 512
_FULL_ROWS: Final = 64
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
        tiles = -(-MOST_ROWS // self._tiles[-1].rows)
        self.arrived = torch.zeros(tiles * blocks, dtype=torch.int32, device=device)
        self._bytes += sum(part.nbytes for part in self._parts if isinstance(part, torch.Tensor))
        self._bytes += sum(part.nbytes() for part in stored)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x, None)

    def opens(self, act: Activation) -> bool:
        plain = any(isinstance(part, torch.Tensor) for part in self._parts)
        return not plain and describe_opening(act) is not None

    def multiply_opened(self, inner: torch.Tensor, act: Activation) -> torch.Tensor:
        """Open what is multiplied as it is turned, unless every program turns it by itself."""
        few, _ = self._choose(inner.shape[:-1].numel())
        return super().multiply_opened(inner, act) if few else self._multiply(inner, act)

    def _multiply(self, x: torch.Tensor, act: Activation | None) -> torch.Tensor:
        """Return the product with `x` [..., inputs], or with what `act` makes of it."""
        shape = x.shape[:-1]
        x = x.reshape(-1, x.shape[-1]).contiguous()
        out = torch.empty((len(x), self.outputs), dtype=x.dtype, device=x.device)
        if not len(x):
            return out.view(*shape, self.outputs)
        few, tile = self._choose(len(x))
        inputs = TurnedInputs(x, self._inputs, self._scales, act)
        for place, part, bias, sorts in self._pieces():
            if isinstance(part, torch.Tensor):
                out[:, place] = multiply_plain(x, part, bias, invariant=self.invariant)
            elif few is not None:
                self._launch_few(out[:, place], x, part, bias, few)
            elif tile is None:
                write_and_multiply(out[:, place], inputs, sorts, part, bias)
            else:
                for first in range(0, len(x), MOST_ROWS):
                    some = slice(first, first + MOST_ROWS)
                    turned = inputs.turn()[sorts, some]
                    self._launch(out[some, place], turned, part, bias, tile)
        return out.view(*shape, self.outputs)

    @property
    def lone(self) -> Trellis | None:
        """The matrix of all outputs; None if there are several."""
        (first, *more) = self._parts
        return first if isinstance(first, Trellis) and not more else None

    def join_halves(self) -> Trellis | None:
        """Return two matrices of equally many outputs as one, of whole blocks each; None otherwise.

        They are gates and ups whose number 128 does not divide, which no launch of ours multiplies.
        """
        stored = [part for part in self._parts if isinstance(part, Trellis)]
        if len(self._parts) != 2 or len(stored) != 2:
            return None
        first, second = stored
        alike = first.form == second.form and first.outputs == second.outputs
        return join_below(first, second) if alike else None

    def pack(self) -> None:
        """Start compiling the kernels for all numbers of rows; those that open inputs later on."""
        parts = (p if isinstance(p, Trellis) else len(p) for p in self._parts)
        sorts = [(p.form, p.outputs) if isinstance(p, Trellis) else p for p in parts]
        kind = ("trellis", self.weight.dtype, self.bias is None, *sorts)
        compile_beside(self.weight.device, self._launch_each, kind)

    @property
    def _tiles(self) -> tuple[TrellisTile, ...]:
        return choose_trellis_tiles(self.weight.dtype, generation(self.weight.device))

    def _choose(self, rows: int) -> tuple[int | None, TrellisTile | None]:
        """Return how `rows` are multiplied: as so few, in tiles, or else by a library."""
        rows = apparent_rows(rows, invariant=self.invariant)
        few = next((few for few in FEW if rows <= few), None)
        written = rows > MOST_ROWS and self.weight.dtype.itemsize == 2
        fitting = (tile for tile in self._tiles if rows <= tile.rows)
        return few, None if written else next(fitting, self._tiles[-1])

    def _launch_each(self) -> None:
        """Launch one program of every kernel variant that some number of rows uses."""
        ways = {
            self._choose(rows) for rows in (*FEW, *(t.rows for t in self._tiles), MOST_ROWS + 1)
        }
        x = self.weight.new_zeros((max(tile.rows for tile in self._tiles), self._inputs))
        inputs = TurnedInputs(x, self._inputs, self._scales)
        turned = inputs.turn()
        out = self.weight.new_empty((len(x), self.outputs))
        for place, part, bias, sorts in self._pieces():
            if isinstance(part, torch.Tensor):
                continue
            for few, tile in ways:
                if few is not None:
                    self._launch_few(out[:few, place], x[:few], part, bias, few, only_one=True)
                elif tile is not None:
                    own = out[: tile.rows, place], turned[sorts, : tile.rows], part, bias
                    self._launch(*own, tile, only_one=True)
                else:
                    inputs.turn_and_write(part, 0, 1)

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
        from tgi_trio.shard.torch_backend.kernels.linears.trellis_products import (  # Triton
            multiply_turned_few,
        )

        grid, sums, constants = self._prepare(x, part, bias, few)
        multiply_turned_few[(1, 1) if only_one else grid[:2]](
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
        """Multiply `turned` rows [sorts, rows, padded], at most `MOST_ROWS`."""
        from tgi_trio.shard.torch_backend.kernels.linears.trellis_products import multiply_turned

        grid, sums, constants = self._prepare(turned[0], part, bias, tile.rows)
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
        self, x: torch.Tensor, part: Trellis, bias: torch.Tensor | None, rows: int
    ) -> tuple[tuple[int, int, int], torch.Tensor, dict[str, Any]]:
        """Return a product's grid, memory for partial sums, and constants.

        `x`: what is multiplied, in tiles of `rows`.
        """
        blocks, tiles = len(part.sorts), -(-len(x) // rows)
        filling = blocks * (1 if self.invariant else tiles * max(1, rows // _FULL_ROWS))
        parts = count_parts(filling, part.form.padded // TURNED)
        found = tiles * blocks * parts * rows * TURNED if parts > 1 else 1
        sums = torch.empty(found, dtype=torch.float32, device=x.device)
        constants = {
            "HALF_BITS": part.form.half_bits,
            "BOOK": part.form.book,
            "HAS_BIAS": bias is not None,
            "DIVIDED": parts > 1,
            "ROWS": rows,
        }
        return (blocks, parts, tiles), sums, constants


def _outputs_of(part: Trellis | torch.Tensor) -> int:
    return part.outputs if isinstance(part, Trellis) else len(part)


def count_parts(blocks: int, runs: int) -> int:
    """Return how many programs share a block's runs of inputs (split-K), each with one at least."""
    parts = max(1, min(_PROGRAMS // blocks, runs, _MOST_PARTS))
    return -(-runs // -(-runs // parts))
