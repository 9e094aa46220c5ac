"""Every kind of launch of products with EXL3's matrices: all codebooks, all widths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch

from tgi_trio.shard.torch_backend.kernels.experts import grouped_trellis
from tgi_trio.shard.torch_backend.kernels.linears import trellis_inputs, trellis_products
from tgi_trio.shard.torch_backend.layers.linears.trellis_tiles import (
    FEW,
    TURN_WARPS,
    TURNED_ROWS,
    WRITTEN,
    WRITTEN_STEPS,
    TrellisTile,
    choose_expert_tiles,
    choose_trellis_tiles,
    count_few_warps,
)
from tgi_trio.shard.torch_backend.torch_device import Generation
from tgi_trio.testing.variant import BF16, EVEN, F16, F32, I32, Variant

# Codebooks with half bits of a weight. From 5.5 bits on runs are short; 8 bits have most words.
STORED: Final[tuple[tuple[str, int], ...]] = (
    *(("3inst", 6), ("3inst", 16), ("mcg", 4), ("mcg", 8), ("mcg", 12)),
    *(("mul1", 5), ("mul1", 8), ("mul1", 12)),
)
_WIDE: Final[tuple[tuple[str, int], ...]] = (("mcg", 8), ("mul1", 12))  # for float32
_EXPERTS: Final[tuple[tuple[str, int], ...]] = (
    ("mcg", 6),
    ("mcg", 12),
    ("mul1", 8),
)  # for mixtures, in half precision
_SIZE: Final = f"i32{EVEN}"


def trellis_variants(generation: Generation) -> Iterator[Variant]:
    """Yield the variants that are launched on devices of a generation."""
    for dtype, stored in ((BF16, STORED), (F32, _WIDE)):
        for act in ("", "silu", "quick_gelu", "relu2"):
            yield _turn(dtype, act)
        for book, half_bits in stored:
            for few in FEW:
                yield _multiply_few(book, half_bits, dtype, few)
            for tile in choose_trellis_tiles(dtype, generation):
                yield _multiply(book, half_bits, dtype, tile)
            if dtype is BF16:
                yield _write(book, half_bits, "")
                yield _write(book, half_bits, "silu")
    yield from _of_experts(generation)
    # Where there are many outputs, nobody shares a block; some vocabularies are odd.
    yield _multiply_few("mcg", 12, BF16, 1, divided=False, even="")
    yield _multiply("mcg", 12, BF16, choose_trellis_tiles(BF16, generation)[-1], divided=False)


def _of_experts(generation: Generation) -> Iterator[Variant]:
    for dtype, stored in ((BF16, _EXPERTS), (F32, _WIDE[:1])):
        few, many = choose_expert_tiles(dtype, generation)
        yield from (_turn_groups(dtype, way) for way in ("in", "out"))
        for book, half_bits in stored:
            for tile in (few, many) if dtype is BF16 else (few,):
                for way in ("in", "in turned", "out"):
                    yield _multiply_groups(book, half_bits, dtype, tile, way)


def _name(kernel: str, dtype: torch.dtype, *more: object) -> str:
    return " ".join((kernel, "fp32" if dtype is F32 else "bf16", *map(str, more)))


_TURNING: Final = (F16, "fp32", "fp32", "i32", _SIZE, _SIZE)  # all but turned inputs, and inputs


def _opening(act: str) -> dict[str, Any]:
    """Return constants for an activation; "quick_gelu" as gpt-oss has it, "relu2" has no gates."""
    limits = act == "quick_gelu"
    flags = {"LIMITS": limits, "RAISED": limits, "PAIRED": limits}
    return {"ROWS": TURNED_ROWS, "ACT": act, "GATED": act not in ("", "relu2"), **flags}


def _turn(dtype: torch.dtype, act: str) -> Variant:
    return Variant(
        _name("turn_inputs", dtype, *([act] if act else [])),
        trellis_inputs.turn_inputs,
        (dtype, dtype, *_TURNING),
        _opening(act),
        warps=TURN_WARPS,
    )


def _constants(book: str, half_bits: int, rows: int, *, divided: bool) -> dict[str, Any]:
    own = {"HALF_BITS": half_bits, "BOOK": book, "HAS_BIAS": True}
    return own | {"DIVIDED": divided, "ROWS": rows}


def _multiply_few(
    book: str,
    half_bits: int,
    dtype: torch.dtype,
    rows: int,
    *,
    divided: bool = True,
    even: str = EVEN,
) -> Variant:
    stored = (I32, F16, I32, F16)
    return Variant(
        _name(
            "multiply_turned_few", dtype, rows, book, half_bits / 2, *([] if divided else ["whole"])
        ),
        trellis_products.multiply_turned_few,
        (dtype, F32, I32, dtype, *stored, dtype, "i32", f"i32{even}", _SIZE, _SIZE, f"i32{even}"),
        _constants(book, half_bits, rows, divided=divided),
        warps=count_few_warps(rows, half_bits),
    )


def _multiply(
    book: str, half_bits: int, dtype: torch.dtype, tile: TrellisTile, *, divided: bool = True
) -> Variant:
    sizes = ("i32", "i32", _SIZE, _SIZE, _SIZE, "i32")
    return Variant(
        _name(
            "multiply_turned",
            dtype,
            tile.rows,
            book,
            half_bits / 2,
            *([] if divided else ["whole"]),
        ),
        trellis_products.multiply_turned,
        (dtype, F32, I32, dtype, I32, I32, F16, dtype, *sizes),
        _constants(book, half_bits, tile.rows, divided=divided) | {"DEPTH": tile.depth},
        warps=tile.warps,
        stages=tile.stages,
    )


def _groups(way: str) -> dict[str, Any]:
    """Return constants of 128 experts, 8 per token, as `mixture_variants.py` has."""
    return {"GROUPS": 128, "PADDED_GROUPS": 128, "PER_ROW": 8, "GATHERS": way == "in"}


def _turn_groups(dtype: torch.dtype, way: str) -> Variant:
    sorts = {"SORTS": 2 if way == "in" else 1, "ROWS": TURNED_ROWS}
    return Variant(
        _name("turn_groups", dtype, way),
        grouped_trellis.turn_groups,
        (dtype, dtype, F16, I32, I32, "i32", _SIZE, _SIZE, _SIZE),
        _groups(way) | sorts,
        warps=TURN_WARPS,
    )


def _multiply_groups(
    book: str, half_bits: int, dtype: torch.dtype, tile: TrellisTile, way: str
) -> Variant:
    own = {"N": 1536, "HAS_BIAS": way == "out", "ACT": "" if way == "out" else "silu"}
    own |= {"LIMITS": False, "RAISED": False, "TURNS": way == "in turned"}
    own |= {"HALF_BITS": half_bits, "BOOK": book}
    sizes = ("i32", "fp32", _SIZE, _SIZE, "i32")
    return Variant(
        _name("multiply_turned_groups", dtype, tile.rows, book, half_bits / 2, way),
        grouped_trellis.multiply_turned_groups,
        (dtype, dtype, I32, I32, F16, dtype, F16, I32, I32, *sizes),
        _groups(way.removesuffix(" turned")) | own | {"ROWS": tile.rows, "DEPTH": tile.depth},
        warps=tile.warps,
        stages=tile.stages,
    )


def _write(book: str, half_bits: int, act: str) -> Variant:
    written = {"DEPTH": WRITTEN.depth, "STEPS": WRITTEN_STEPS}
    return Variant(
        _name("turn_and_write", BF16, book, half_bits / 2, *([act] if act else [])),
        trellis_inputs.turn_and_write,
        (BF16, BF16, *_TURNING, BF16, I32, F16, "i32", "i32", "i32"),
        _opening(act) | {"HALF_BITS": half_bits, "BOOK": book} | written,
        warps=WRITTEN.warps,
        stages=WRITTEN.stages,
    )
