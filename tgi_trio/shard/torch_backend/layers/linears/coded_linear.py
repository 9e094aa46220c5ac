"""Linear layers on a device whose weights stay quantised: kernels multiply by the codes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

from tgi_trio.shard.torch_backend.batch_invariance import apparent_rows
from tgi_trio.shard.torch_backend.compiling.ahead import compile_beside
from tgi_trio.shard.torch_backend.layers.linears.code_tiles import (
    CodeTile,
    FewCodedTile,
    choose_few_tiles,
    choose_tiles,
)
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.layers.linears.plain_product import multiply_plain
from tgi_trio.shard.torch_backend.layers.linears.rounded_product import (
    multiply_rounded,
    takes_rounded,
)
from tgi_trio.shard.torch_backend.layers.linears.stored_codes import (
    KINDS,
    TENSORS,
    Codes,
    join,
    split,
)
from tgi_trio.shard.torch_backend.torch_device import generation

WRITTEN: Final = (1, 128)  # outputs and units of a program of `write_numbers`
_SCRATCH: Final = 256 << 20  # bytes of numbers that are written at a time
# A tile is divided among programs (split-K) while there are fewer than these, as for attention.
_PROGRAMS = 512
_MOST_PARTS = 16
_LEAST_STEPS = 4  # of the loop, in each part
_ROWS_AT_ONCE: Final = 512  # with parts; more rows go one run after another, for less memory
_BLOCK: Final = 256  # outputs of a program of `add_parts`
ONE: Final = 0x3F800000  # the bits of 1.0


class CodedLinear(Linear):
    """y = x W^T + b. W is several matrices stacked along the outputs; some may be plain."""

    __slots__ = ("_inputs", "_parts", "_rounded", "outputs")

    def __init__(
        self,
        parts: Sequence[Codes | torch.Tensor],
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
        *,
        activations: int = 16,
        invariant: bool = False,
    ) -> None:
        """`parts`: [outputs of each, inputs], on the host or the device, at least one of codes.

        Plain ones are of `dtype`, as is x. `activations` 8: inputs are rounded to 8 bits for the
        products that can use that. `invariant`: as for `Linear`.
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
        self.outputs = sum(map(_outputs_of, self._parts))
        nothing = torch.empty((0, self._inputs), dtype=dtype, device=device)
        super().__init__(nothing, bias, invariant=invariant)
        self._bytes += sum(
            part.nbytes() if isinstance(part, Codes) else part.nbytes for part in self._parts
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        shape = x.shape[:-1]
        x = x.reshape(-1, self._inputs).contiguous()
        pieces = list(self._pieces())
        if len(pieces) == 1:
            _, part, bias, rounded = pieces[0]
            if isinstance(part, Codes) and not rounded and self._writes(part, x):
                return multiply_written(x, part, bias).view(*shape, self.outputs)
        out = torch.empty((len(x), self.outputs), dtype=x.dtype, device=x.device)
        for place, part, bias, rounded in pieces:
            if isinstance(part, torch.Tensor):
                out[:, place] = multiply_plain(x, part, bias, invariant=self.invariant)
            elif rounded:
                multiply_rounded(out[:, place], x, part, bias)
            elif self._writes(part, x):
                out[:, place] = multiply_written(x, part, bias)
            else:
                multiply(out[:, place], x, part, bias, invariant=self.invariant)
        return out.view(*shape, self.outputs)

    def _writes(self, codes: Codes, x: torch.Tensor) -> bool:
        """Return whether `x` has so many rows that W is written as numbers for a library."""
        most = choose_tiles(x.dtype, generation(x.device), codes.form.kind)[-1].most
        return apparent_rows(len(x), invariant=self.invariant) > most

    @property
    def lone(self) -> Codes | None:
        """The codes of all outputs; None if there are several matrices, or inputs are rounded."""
        (first, *more) = self._parts
        return first if isinstance(first, Codes) and not more and not self.rounds else None

    @property
    def rounds(self) -> bool:
        """Whether any product rounds its inputs to 8 bits."""
        return any(self._rounded)

    def join(self, other: CodedLinear) -> CodedLinear | None:
        """Return a linear of the outputs of both, whose codes are views of its own from then on.

        None where these differ in format, or inputs are rounded; neither has a bias.
        """
        mine, others = self.lone, other.lone
        if mine is None or others is None or self.weight.dtype is not other.weight.dtype:
            return None
        stacked = join([mine, others])
        if len(stacked) > 1:
            return None
        nothing = self.weight
        whole = CodedLinear(stacked, None, nothing.dtype, nothing.device, invariant=self.invariant)
        self._parts[:1], other._parts[:1] = ([part] for part in split(stacked[0], (mine, others)))
        return whole

    def pack(self) -> None:
        """Start compiling the kernels for all numbers of rows."""
        sorts = [part.sort if isinstance(part, Codes) else len(part) for part in self._parts]
        kind = (self.weight.dtype, self.bias is None, *self._rounded, *sorts)
        compile_beside(self.weight.device, self._launch_each, kind)

    def _launch_each(self) -> None:
        """Launch one program of every kernel variant that some number of rows uses."""
        dtype = self.weight.dtype
        for place, part, bias, rounded in self._pieces():
            if isinstance(part, torch.Tensor):
                continue
            tiles = choose_tiles(dtype, generation(self.weight.device), part.form.kind)
            x = self.weight.new_zeros((max(tile.rows for tile in tiles), self._inputs))
            out = self.weight.new_empty((len(x), self.outputs))[:, place]
            if rounded:
                multiply_rounded(out[:1], x[:1], part, bias)
                continue
            for few in pick_few_tiles(part, dtype):
                launch_few(out[: few.rows], x[: few.rows], part, bias, few, only_one=True)
            for tile in tiles:
                own = out[: tile.rows], x[: tile.rows], part, bias, tile
                launch(*own, only_one=True, invariant=self.invariant)
            if dtype.itemsize == 2:
                write(part, 0, WRITTEN[0], dtype)

    def _pieces(self) -> Iterator[tuple[slice, Codes | torch.Tensor, torch.Tensor | None, bool]]:
        """Yield for each matrix: its outputs, itself, its bias, whether its inputs are rounded."""
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
    *,
    invariant: bool,
) -> None:
    """Write x W^T + b to `out` [rows, outputs], whose rows are contiguous.

    `x`: [rows, inputs], contiguous, no more rows than the largest tile is for; `bias`: [outputs].
    `invariant`: whatever the number of rows is, see `batch_invariance.py`; likewise below.
    """
    rows, kind = apparent_rows(len(x), invariant=invariant), codes.form.kind
    few = next((few for few in pick_few_tiles(codes, x.dtype) if few.rows == rows), None)
    if few is not None:
        launch_few(out, x, codes, bias, few)
        return
    tiles = choose_tiles(x.dtype, generation(x.device), kind)
    tile = next(tile for tile in tiles if rows <= tile.most)
    run = _ROWS_AT_ONCE if tile.divided else max(1, len(x))
    for first in range(0, len(x), run):
        part = slice(first, first + run)
        launch(out[part], x[part], codes, bias, tile, invariant=invariant)


def pick_few_tiles(codes: Codes, dtype: torch.dtype) -> tuple[FewCodedTile, ...]:
    """Return a matrix's tiles for few rows."""
    return choose_few_tiles(dtype, codes.form.kind, ordered=codes.order is not None)


def multiply_written(x: torch.Tensor, codes: Codes, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x W^T + b [rows, outputs]: W is written as numbers, which a library multiplies by.

    As many outputs at a time as scratch memory holds. `x`: [rows, inputs]; `bias`: [outputs].
    """
    if codes.order is not None:
        x = x.index_select(1, codes.order.clamp(min=0))
    each = max(1, _SCRATCH // (codes.written * x.dtype.itemsize))
    if codes.outputs <= each:
        return torch.nn.functional.linear(x, write(codes, 0, codes.outputs, x.dtype), bias)
    out = torch.empty((len(x), codes.outputs), dtype=x.dtype, device=x.device)
    for first in range(0, codes.outputs, each):
        part = slice(first, min(first + each, codes.outputs))
        weight = write(codes, first, part.stop - first, x.dtype)
        out[:, part] = torch.nn.functional.linear(x, weight, None if bias is None else bias[part])
        del weight  # its memory is free for the next one
    return out


def write(codes: Codes, first: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return `count` outputs, beginning with `first`, as numbers [count, inputs as stored]."""
    from tgi_trio.shard.torch_backend.kernels.linears.written_codes import write_numbers  # Triton

    form = codes.form
    weight = torch.empty((count, codes.written), dtype=dtype, device=codes.codes.device)
    outputs, units = WRITTEN
    write_numbers[(-(-count // outputs), -(-form.units // units))](
        weight,
        *list_tensors(codes),
        first,
        count,
        codes.written,
        form.units,
        ONE,
        **list_constants(codes),
        OUTPUTS=outputs,
        UNITS=units,
    )
    return weight


def list_tensors(codes: Codes) -> tuple[torch.Tensor, ...]:
    """Return a matrix's tensors for a kernel; any tensor stands for one that it lacks."""
    found, nothing = codes.tensors(), codes.codes
    return tuple(found.get(name, nothing) for name in TENSORS)


def list_constants(codes: Codes) -> dict[str, Any]:
    """Return a matrix's compile-time constants."""
    form, kind = codes.form, KINDS[codes.form.kind]
    return {
        "BITS": kind.bits,
        "NUMBERS": kind.numbers,
        "GROUP": form.group,
        "LOWS": form.lows,
        "ZERO": form.zero,
        "NESTED": form.nested,
        "ORDERED": codes.order is not None,
        "NATIVE": kind.numbers == "e4m3" and generation(codes.codes.device) == "hopper",
    }


def list_steps(codes: Codes, tile: CodeTile) -> dict[str, Any]:
    """Return the constants of a tile's loop over a matrix's inputs."""
    units = count_units(codes.form.kind, tile)
    even = codes.order is None and codes.form.inputs % (units * KINDS[codes.form.kind].unit) == 0
    return {"UNITS": units, "EVEN": even}


def count_units(kind: str, tile: CodeTile) -> int:
    """Return the units of inputs of one step of the loop."""
    return max(1, tile.depth // KINDS[kind].unit)


def count_parts(codes: Codes, tile: CodeTile, rows: int) -> int:
    """Return how many programs share each tile of a product (split-K)."""
    if not tile.divided:
        return 1
    programs = -(-codes.outputs // tile.outputs) * -(-rows // tile.rows)
    steps = -(-codes.form.width // tile.depth)
    return max(1, min(_PROGRAMS // programs, steps // _LEAST_STEPS, _MOST_PARTS))


def launch_few(
    out: torch.Tensor,
    x: torch.Tensor,
    codes: Codes,
    bias: torch.Tensor | None,
    tile: FewCodedTile,
    *,
    only_one: bool = False,
) -> None:
    """Multiply a few rows; `only_one`: launch a single program, to compile the kernel."""
    from tgi_trio.shard.torch_backend.kernels.linears.few_codes import multiply_few_rows  # Triton

    multiply_few_rows[(1 if only_one else -(-codes.outputs // tile.outputs),)](
        out,
        x,
        *list_tensors(codes),
        x if bias is None else bias,
        codes.outputs,
        codes.form.inputs,
        codes.form.units,
        out.stride(0),
        ONE,
        **list_constants(codes),
        HAS_BIAS=bias is not None,
        OUTPUTS=tile.outputs,
        ROWS=tile.rows,
        UNITS=tile.units,
        num_warps=tile.warps,
    )


def launch(
    out: torch.Tensor,
    x: torch.Tensor,
    codes: Codes,
    bias: torch.Tensor | None,
    tile: CodeTile,
    *,
    only_one: bool = False,
    invariant: bool,
) -> None:
    """Multiply with a tile; `only_one`: launch single programs, to compile the kernels."""
    from tgi_trio.shard.torch_backend.kernels.linears.codes import (  # Triton
        add_parts,
        multiply_codes,
    )

    rows = len(x)
    parts = count_parts(codes, tile, apparent_rows(rows, invariant=invariant))
    # Decided by a single row's number of parts, so that a tile has one variant of the kernel.
    divided = count_parts(codes, tile, apparent_rows(1, invariant=invariant)) > 1
    sums = out
    if divided:
        sums = torch.empty((parts, rows, codes.outputs), dtype=torch.float32, device=x.device)
    grid = (-(-codes.outputs // tile.outputs), -(-rows // tile.rows), parts)
    multiply_codes[(1, 1, 1) if only_one else grid](
        out,
        sums,
        x,
        *list_tensors(codes),
        x if bias is None or divided else bias,
        rows,
        codes.outputs,
        codes.form.inputs,
        codes.form.units,
        out.stride(0),
        ONE,
        **list_constants(codes),
        HAS_BIAS=bias is not None and not divided,
        DIVIDED=divided,
        OUTPUTS=tile.outputs,
        ROWS=tile.rows,
        **list_steps(codes, tile),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if divided:
        add_parts[(1, 1) if only_one else (rows, -(-codes.outputs // _BLOCK))](
            out,
            sums,
            sums if bias is None else bias,
            rows,
            0 if only_one else parts,  # a single program has written too little to add up
            codes.outputs,
            out.stride(0),
            HAS_BIAS=bias is not None,
            BLOCK=_BLOCK,
        )
