"""Every kind of launch of products with quantised weights, for all formats."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

from tgi_trio.shard.torch_backend.kernels.experts import grouped_codes
from tgi_trio.shard.torch_backend.kernels.linears import codes, few_codes, rounding, written_codes
from tgi_trio.shard.torch_backend.layers.experts.grouped_matrices import choose_group_tiles
from tgi_trio.shard.torch_backend.layers.linears.code_tiles import (
    CodeTile,
    FewCodedTile,
    choose_few_tiles,
    choose_tiles,
)
from tgi_trio.shard.torch_backend.layers.linears.coded_linear import (
    WRITTEN,
    count_units,
)
from tgi_trio.shard.torch_backend.layers.linears.stored_codes import KINDS, Lows
from tgi_trio.shard.torch_backend.torch_device import Generation
from tgi_trio.testing.variant import BF16, E4M3, EVEN, F16, F32, I8, I32, TYPES, U8, Variant


@dataclass(frozen=True)
class Stored:
    """A format's matrices, as the kernel's constants describe them; see `CodeLayout`."""

    kind: str
    group: int
    lows: Lows = ""
    zero: int = 0
    nested: int = 0
    scales: torch.dtype = F16
    low: torch.dtype = F16
    ordered: bool = False


# By formats of checkpoints, types of GGUF, and values of `--quantize`.
STORED: Final[dict[str, Stored]] = {
    "GPTQ, AWQ by 128": Stored("u4", 128, "zeros", low=U8),
    "GPTQ, AWQ by 32": Stored("u4", 32, "zeros", low=U8),
    "GPTQ by 128, any order": Stored("u4", 128, "zeros", low=U8, ordered=True),
    "GPTQ by 128, symmetric": Stored("u4", 128, "constant", 8),
    "w4a16 by 128, bfloat16's scales": Stored("u4", 128, "constant", 8, scales=F32),
    "torchao's Int4 by 128": Stored("u4", 128, "lows", low=F32),
    "w4a16 by output": Stored("u4", 0, "zeros", low=U8),
    "GPTQ, 8 bits": Stored("u8", 128, "zeros", low=U8),
    "w8a16 by output": Stored("u8", 0, "constant", 128),
    "int8 by output": Stored("i8", 0, scales=F32),
    "NF4, FP4": Stored("t4", 64, scales=F32),
    "FP8 by output": Stored("e4m3", 0, scales=F32),
    "FP8 by blocks": Stored("e4m3", 128, scales=F32),
    "Q4_0": Stored("u4", 32, "constant", 8),
    "Q4_1": Stored("u4", 32, "lows"),
    "Q5_0": Stored("u5", 32, "constant", 16),
    "Q5_1": Stored("u5", 32, "lows"),
    "Q8_0": Stored("i8", 32),
    "IQ4_NL, MXFP4": Stored("t4", 32),
    "IQ4_XS": Stored("t4", 32, nested=8, scales=I8),
    "GPTQ, 2 bits": Stored("u2", 128, "zeros", low=U8),
    "BitNet": Stored("u2", 0, "constant", 1, scales=F32),
    "TQ1_0, TQ2_0": Stored("u2", 128, "constant", 1),
    "Q2_K": Stored("u2", 16, "lows", nested=16, scales=U8, low=U8),
    "Q3_K": Stored("u4", 16, "constant", 4, nested=16, scales=I8),
    "Q4_K": Stored("u4", 32, "lows", nested=8, scales=U8, low=U8),
    "Q5_K": Stored("u5", 32, "lows", nested=8, scales=U8, low=U8),
    "Q6_K": Stored("u6", 16, "constant", 32, nested=16, scales=I8),
}
_WIDE: Final = ("GPTQ, AWQ by 128", "Q4_K", "Q6_K", "NF4, FP4", "FP8 by blocks")  # for float32
# For mixtures of experts: one format of each kind of codes, and of each kind of scales.
_EXPERTS: Final = (
    *("GPTQ, AWQ by 128", "int8 by output", "NF4, FP4", "FP8 by blocks", "IQ4_NL, MXFP4"),
    *("Q4_0", "Q8_0", "GPTQ, 2 bits", "Q4_K", "Q5_K", "Q6_K"),
)


def code_variants(generation: Generation) -> Iterator[Variant]:
    """Yield the variants that are launched on devices of a generation."""
    for dtype, names in ((BF16, tuple(STORED)), (F32, _WIDE)):
        for name in names:
            kind, ordered = STORED[name].kind, STORED[name].ordered
            for few in choose_few_tiles(dtype, kind, ordered=ordered):
                yield _multiply_few(name, few, generation)
            for tile in choose_tiles(dtype, generation, kind):
                yield _multiply(name, dtype, tile, generation)
            if dtype is BF16:
                yield _write(name, generation)
    # Numbers of outputs that are not multiples of 16, as of some vocabularies.
    for name in ("Q6_K", "GPTQ, AWQ by 128"):
        for tile in choose_tiles(BF16, generation, STORED[name].kind):
            yield _multiply(name, BF16, tile, generation, even="")
    for name in ("Q6_K", "NF4, FP4"):  # unless inputs are few, or outputs many
        for tile in choose_tiles(BF16, generation, STORED[name].kind):
            undivided = tile._replace(divided=False)
            yield _multiply(name, BF16, undivided, generation, more=", undivided")
    for even in (EVEN, ""):
        yield Variant(
            f"add_parts bf16{'' if even else ' odd'}",
            codes.add_parts,
            (BF16, F32, BF16, "i32", "i32", f"i32{even}", f"i32{even}"),
            {"HAS_BIAS": True, "BLOCK": 256},
        )
    for dtype, names in ((BF16, _EXPERTS), (F32, _WIDE)):
        for name in names:
            tiles = choose_group_tiles(dtype, generation, STORED[name].kind)
            for tile in tiles[: 2 if dtype is BF16 else 1]:
                limited = ("in gated limits paired",) if "MXFP4" in name else ()  # gpt-oss
                for way in ("in gated", *limited, "out"):
                    yield _multiply_groups(name, dtype, tile, generation, way)
    yield from _rounded(generation)


def _rounded(generation: Generation) -> Iterator[Variant]:
    """Yield the kernels before and after products of 8-bit numbers; FP8 is for newer devices."""
    yield Variant(
        "scale_sums bf16",
        rounding.scale_sums,
        (BF16, I32, F32, F32, BF16, f"i32{EVEN}", f"i32{EVEN}"),
        {"HAS_BIAS": True, "BLOCK": 1024},
    )
    for dtype, most in ((I8, 127.0), (E4M3, 448.0)):
        if dtype is I8 or generation == "hopper":
            yield Variant(
                f"round_rows bf16 {TYPES[dtype]}",
                rounding.round_rows,
                (dtype, F32, BF16, f"i32{EVEN}", f"i32{EVEN}"),
                {"MOST": most, "WHOLE": dtype is I8, "BLOCK": 1024},
            )


def _multiply(
    name: str,
    dtype: torch.dtype,
    tile: CodeTile,
    generation: Generation,
    even: str = EVEN,
    more: str = "",
) -> Variant:
    pointers, constants = _stored(name, generation)
    sizes = ("i32", f"i32{even}", f"i32{EVEN}", f"i32{EVEN}", f"i32{even}", "i32")
    wide = "fp32" if dtype is F32 else "bf16"
    constants |= _steps(name, tile)
    return Variant(
        f"multiply_codes {wide} {tile.rows} {name}{'' if even else ', odd'}{more}",
        codes.multiply_codes,
        (dtype, F32, dtype, *pointers, dtype, *sizes),
        constants | {"HAS_BIAS": not tile.divided, "DIVIDED": tile.divided},
        warps=tile.warps,
        stages=tile.stages,
    )


def _multiply_few(name: str, tile: FewCodedTile, generation: Generation) -> Variant:
    pointers, constants = _stored(name, generation)
    sizes = (f"i32{EVEN}", f"i32{EVEN}", f"i32{EVEN}", f"i32{EVEN}", "i32")
    return Variant(
        f"multiply_few_rows bf16 {tile.rows} {name}",
        few_codes.multiply_few_rows,
        (BF16, BF16, *pointers, BF16, *sizes),
        constants
        | {"HAS_BIAS": True, "OUTPUTS": tile.outputs, "ROWS": tile.rows, "UNITS": tile.units},
        warps=tile.warps,
    )


def _write(name: str, generation: Generation) -> Variant:
    pointers, constants = _stored(name, generation)
    outputs, units = WRITTEN
    return Variant(
        f"write_numbers bf16 {name}",
        written_codes.write_numbers,
        (BF16, *pointers, "i32", "i32", f"i32{EVEN}", f"i32{EVEN}", "i32"),
        constants | {"OUTPUTS": outputs, "UNITS": units},
    )


def _multiply_groups(
    name: str, dtype: torch.dtype, tile: CodeTile, generation: Generation, way: str
) -> Variant:
    """Return a product with 128 experts, 8 per token, as `mixture_variants.py` has."""
    pointers, constants = _stored(name, generation)
    constants |= _steps(name, tile)
    limits = "limits" in way
    more = {
        "N": 1536,
        "GROUPS": 128,
        "PADDED_GROUPS": 128,
        "PER_ROW": 8,
        "GATHERS": way != "out",
        "HAS_BIAS": limits or way == "out",
        "ACT": "silu" if "gated" in way else "",
        "LIMITS": limits,
        "RAISED": limits,
        "PAIRED": limits,
    }
    sizes = ("i32", "fp32", f"i32{EVEN}", f"i32{EVEN}", "i32")
    wide = "fp32" if dtype is F32 else "bf16"
    return Variant(
        f"multiply_coded_groups {wide} {tile.rows} {name} {way}",
        grouped_codes.multiply_coded_groups,
        (dtype, dtype, *pointers, dtype, I32, I32, *sizes),
        constants | more,
        warps=tile.warps,
        stages=tile.stages,
    )


def _stored(name: str, generation: Generation) -> tuple[tuple[torch.dtype, ...], dict[str, Any]]:
    """Return the dtypes of the tensors of a format's matrices, and its constants."""
    stored = STORED[name]
    kind = KINDS[stored.kind]
    constants: dict[str, Any] = {
        "BITS": kind.bits,
        "NUMBERS": kind.numbers,
        "GROUP": stored.group,
        "LOWS": stored.lows,
        "ZERO": stored.zero,
        "NESTED": stored.nested,
        "ORDERED": stored.ordered,
        "NATIVE": kind.numbers == "e4m3" and generation == "hopper",
    }
    words = U8 if kind.bits == 8 else I32
    return (words, I32, stored.scales, F16, stored.low, F16, F32, I32), constants


def _steps(name: str, tile: CodeTile) -> dict[str, Any]:
    """Return a tile's constants, for inputs that are a multiple of its depth."""
    return {
        "OUTPUTS": tile.outputs,
        "ROWS": tile.rows,
        "UNITS": count_units(STORED[name].kind, tile),
        "EVEN": not STORED[name].ordered,
    }
