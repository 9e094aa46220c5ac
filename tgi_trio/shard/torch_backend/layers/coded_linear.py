"""Linear layers whose weights stay codes, multiplied by a kernel: for devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import torch

from tgi_trio.shard.torch_backend.layers.linear import Linear
from tgi_trio.shard.torch_backend.layers.rounded_product import multiply_rounded, takes_rounded
from tgi_trio.shard.torch_backend.layers.stored_codes import KINDS, Codes, join
from tgi_trio.shard.torch_backend.torch_device import Generation, generation


class CodeTile(NamedTuple):
    """What a program computes together: powers of two."""

    most: int  # rows that it is for, at most
    outputs: int
    rows: int
    warps: int
    stages: int
    divided: bool  # programs may share one


_ANY: Final = 1 << 62
# The largest tiles that registers hold, which `testing/compiled_kernels.py` tells.
_FEW: Final = CodeTile(16, 64, 16, 4, 4, True)
_TILES: Final[dict[Generation, tuple[CodeTile, ...]]] = {
    "ampere": (_FEW, CodeTile(256, 64, 32, 4, 3, True), CodeTile(_ANY, 128, 64, 8, 3, False)),
    "hopper": (_FEW, CodeTile(256, 64, 64, 4, 3, True), CodeTile(_ANY, 128, 128, 8, 3, False)),
}
# Numbers of four bytes are not for the tensor cores, and take twice the registers.
_WIDE_TILES: Final = (CodeTile(16, 32, 16, 4, 2, True), CodeTile(_ANY, 32, 32, 4, 2, False))
# Programs up to which a tile is divided, as for attention.
_PROGRAMS = 512
_MOST_PARTS = 16
_LEAST_STEPS = 4  # of a part
_BLOCK: Final = 256  # outputs whose parts a program adds


def choose_tiles(dtype: torch.dtype, generation: Generation) -> tuple[CodeTile, ...]:
    """Return the tiles for numbers of a dtype, by rising numbers of rows."""
    return _WIDE_TILES if dtype.itemsize > 2 else _TILES[generation]


class CodedLinear(Linear):
    """y = x W^T + b; W is several matrices, one below the other, of which some may be plain."""

    __slots__ = ("_inputs", "_outputs", "_parts", "_rounded", "_tiles")

    def __init__(
        self,
        parts: Sequence[Codes | torch.Tensor],
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
        *,
        activations: int = 16,
    ) -> None:
        """`parts` [outputs of each, inputs], at least one of them codes, on the host or the device;
        plain ones are of `dtype`, which x has as well. `activations` 8: rounded to as many bits
        before products that take them.
        """
        self._parts: list[Codes | torch.Tensor] = []
        for codes in parts:
            last = self._parts[-1:] if isinstance(codes, Codes) else []
            if isinstance(codes, Codes) and last and isinstance(last[0], Codes):
                self._parts[-1:] = join([last[0], codes])
            else:
                self._parts.append(codes)
        self._parts = [part.to(device) for part in self._parts]
        self._rounded = [
            isinstance(part, Codes) and activations == 8 and takes_rounded(part, dtype, device)
            for part in self._parts
        ]
        self._inputs = next(part.form.inputs for part in parts if isinstance(part, Codes))
        self._outputs = sum(map(_outputs_of, self._parts))
        self._tiles = choose_tiles(dtype, generation(device))
        super().__init__(torch.empty((0, self._inputs), dtype=dtype, device=device), bias)
        self._bytes += sum(
            part.nbytes() if isinstance(part, Codes) else part.nbytes for part in self._parts
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        shape = x.shape[:-1]
        x = x.reshape(-1, self._inputs).contiguous()
        out = torch.empty((len(x), self._outputs), dtype=x.dtype, device=x.device)
        for place, part, bias, rounded in self._pieces():
            if isinstance(part, torch.Tensor):
                out[:, place] = torch.nn.functional.linear(x, part, bias)
            elif rounded:
                multiply_rounded(out[:, place], x, part, bias)
            else:
                multiply(out[:, place], x, part, bias, self._tiles)
        return out.view(*shape, self._outputs)

    @property
    def lone(self) -> Codes | None:
        """The codes of all outputs; None where they are of several sorts, or inputs are rounded."""
        (first, *more) = self._parts
        return first if isinstance(first, Codes) and not more and not self.rounds else None

    @property
    def rounds(self) -> bool:
        """Whether activations are rounded to 8 bits before some product."""
        return any(self._rounded)

    def pack(self) -> None:
        """Compile what products of any number of rows will ask for, by one program of each."""
        for tile in self._tiles:
            x = self.weight.new_zeros((tile.rows, self._inputs))
            out = self.weight.new_empty((tile.rows, self._outputs))
            for place, part, bias, rounded in self._pieces():
                if isinstance(part, torch.Tensor):
                    continue
                if rounded:
                    multiply_rounded(out[:1, place], x[:1], part, bias)
                else:
                    launch(out[:, place], x, part, bias, tile, only_one=True)

    def _pieces(self) -> Iterator[tuple[slice, Codes | torch.Tensor, torch.Tensor | None, bool]]:
        """Yield each matrix: where its outputs go, itself, its bias, whether it takes 8 bits."""
        end = 0
        for part, rounded in zip(self._parts, self._rounded, strict=True):
            begin, end = end, end + _outputs_of(part)
            bias = None if self.bias is None else self.bias[begin:end]
            yield slice(begin, end), part, bias, rounded


def _outputs_of(part: Codes | torch.Tensor) -> int:
    return part.outputs if isinstance(part, Codes) else len(part)


def multiply(
    out: torch.Tensor,
    x: torch.Tensor,
    codes: Codes,
    bias: torch.Tensor | None,
    tiles: Sequence[CodeTile],
) -> None:
    """Put x W^T + b into `out` [rows, outputs], dense but for its first stride.

    `x` [rows, inputs], contiguous; `bias` [outputs].
    """
    if not len(x):
        return
    tile = next(tile for tile in tiles if len(x) <= tile.most)
    launch(out, x, codes, bias, tile)


def count_parts(codes: Codes, tile: CodeTile, rows: int) -> int:
    """Return over how many programs each tile of a product is divided."""
    if not tile.divided:
        return 1
    programs = -(-codes.outputs // tile.outputs) * -(-rows // tile.rows)
    most = min(_PROGRAMS // programs, codes.form.steps // _LEAST_STEPS, _MOST_PARTS)
    return max(1, most)


def launch(
    out: torch.Tensor,
    x: torch.Tensor,
    codes: Codes,
    bias: torch.Tensor | None,
    tile: CodeTile,
    *,
    only_one: bool = False,
) -> None:
    """Multiply by tiles of a kind; `only_one`: one program of each launch, for the compiler."""
    from tgi_trio.shard.torch_backend.kernels.codes import add_parts, multiply_codes  # Triton

    form, kind = codes.form, KINDS[codes.form.kind]
    rows, nothing = len(x), codes.codes
    parts = count_parts(codes, tile, rows)
    # By what it takes for the fewest rows, so that a tile has one variant.
    divided = count_parts(codes, tile, 1) > 1
    sums = out
    if divided:
        sums = torch.empty((parts, rows, codes.outputs), dtype=torch.float32, device=x.device)
    grid = (-(-codes.outputs // tile.outputs), -(-rows // tile.rows), parts)
    multiply_codes[(1, 1, 1) if only_one else grid](
        out,
        sums,
        x,
        codes.codes,
        nothing if codes.planes is None else codes.planes,
        codes.scales,
        nothing if codes.units is None else codes.units,
        nothing if codes.lows is None else codes.lows,
        nothing if codes.low_units is None else codes.low_units,
        nothing if codes.table is None else codes.table,
        nothing if codes.order is None else codes.order,
        nothing if bias is None or divided else bias,
        rows,
        codes.outputs,
        form.inputs,
        form.steps,
        out.stride(0),
        BITS=kind.bits,
        NUMBERS=kind.numbers,
        GROUP=form.group,
        LOWS=form.lows,
        ZERO=form.zero,
        NESTED=form.nested,
        ORDERED=codes.order is not None,
        HAS_BIAS=bias is not None and not divided,
        DIVIDED=divided,
        OUTPUTS=tile.outputs,
        ROWS=tile.rows,
        DEPTH=form.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if divided:
        add_parts[(1, 1) if only_one else (rows, -(-codes.outputs // _BLOCK))](
            out,
            sums,
            sums if bias is None else bias,
            rows,
            parts,
            codes.outputs,
            out.stride(0),
            HAS_BIAS=bias is not None,
            BLOCK=_BLOCK,
        )
