"""Self-test of a kind's kernels: random weights, compared with their dequantised values."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.checkpoint.formats.exl3 import BY_NAME, list_numbers
from tgi_trio.shard.checkpoint.formats.fp8 import E4M3_NUMBERS
from tgi_trio.shard.checkpoint.numbers import to_bfloat16, to_float32
from tgi_trio.shard.cpu_backend.arena import address, allocate_zeroed
from tgi_trio.shard.cpu_backend.kinds.kind import (
    BLOCK_INPUTS,
    DIGIT_ZERO,
    E4M3_NO_NUMBER,
    FACTS_BYTES,
    MOST_ZERO,
    Array,
    Codes,
    Field,
    Kind,
    active_block_bytes,
    fill_panels,
)
from tgi_trio.shard.cpu_backend.multiplier import Multiplier
from tgi_trio.shard.cpu_backend.panel_kernel import PanelKernel
from tgi_trio.shard.cpu_backend.tables import DIRECT, UNPACK
from tgi_trio.shard.cpu_backend.weight_layout import PANEL, SPARE_ROWS

Doubles = NDArray[np.float64]
_TOLERANCE = 1e-5  # of float32 sums; integer sums are exact
_ROWS = (1, 13)  # a single row, and tiles of all sizes
_INPUTS = 512


def find_fault(kernel: PanelKernel) -> str | None:
    """Return what is wrong with the products of a kind on this machine, or None."""
    kind = kernel.multiplier.kind
    draw = np.random.default_rng(1)
    span = _INPUTS if kind.span == -1 else kind.span or 128
    weights = random_codes(kind, PANEL, _INPUTS, span, draw)
    if weights.table is not None:  # exact in bfloat16
        weights = replace(weights, table=to_float32(to_bfloat16(weights.table)))
    exact = dequantise(kind, weights, span)
    x = draw.standard_normal((max(_ROWS), _INPUTS)).astype(np.float32)
    for rows, mode in itertools.product(_ROWS, (DIRECT, UNPACK)):
        stored, whole = store_rows(kernel.multiplier, x[:rows])
        found = multiply(kernel, weights, span, stored, mode)
        expected = whole @ exact.T
        error = float(np.abs(found - expected).max() / np.abs(expected).max())
        if not error < _TOLERANCE:
            return f"{kind.name} is {error:.2g} away from the reference, allowed {_TOLERANCE:g}"
    return None


def random_codes(
    kind: Kind, outputs: int, inputs: int, span: int, draw: np.random.Generator
) -> Codes:
    """Return weights [outputs, inputs] with all codes of a kind, with values around 1 or below."""
    most = 15 if kind.table else kind.largest_code
    codes = draw.integers(0, most + 1, (outputs, inputs), np.uint8)
    numbers = {}
    for fields, each in ((kind.head, BLOCK_INPUTS), (kind.span_head, span)):
        for field in fields:
            shape = (outputs, -(-inputs // each), *((field.parts,) if field.parts > 1 else ()))
            if field.name == "starts":  # packing computes them
                continue
            numbers[field.name] = _random_numbers(kind, field, shape, draw)
    if kind.floating == "e4m3":
        codes[codes & E4M3_NO_NUMBER == E4M3_NO_NUMBER] = 0
    table = draw.standard_normal(16, np.float32) if kind.floating == "table" else None
    if kind.numbers:
        table = np.array(kind.numbers, np.float32)
    return Codes(codes, numbers, table)


def _random_numbers(
    kind: Kind, field: Field, shape: tuple[int, ...], draw: np.random.Generator
) -> Array:
    if field.number == "e8":
        return draw.integers(120, 130, shape, np.uint8)
    if field.number == "u1":
        return draw.integers(0, 64, shape, np.uint8)
    if field.number == "i1":
        return draw.integers(-128, 128, shape, np.int8)
    # Weights get both signs.
    size = kind.largest_code / 2 if field.name == "low" else 1
    return draw.uniform(0.001 * size, 0.02 * size, shape).astype(field.dtype)


def dequantise(kind: Kind, weights: Codes, span: int) -> Doubles:
    """Return dequantised codes, float64 [out, in]."""
    outputs, inputs = weights.codes.shape

    def product(names: tuple[str, ...]) -> Doubles:
        result = np.ones((outputs, inputs))
        for name in names:
            field = next(f for f in (*kind.head, *kind.span_head) if f.name == name)
            numbers = weights.numbers[name]
            values = numbers.astype(np.float64).reshape(outputs, -1)
            if field.number == "e8":
                values = np.exp2(values - 127)
            each = span if values.shape[1] == -(-inputs // span) else inputs // values.shape[1]
            result *= np.repeat(values, each, axis=1)[:, :inputs]
        return result

    table: Array | None = np.asarray(kind.table) if kind.table else weights.table
    if kind.floating == "e4m3":
        table = E4M3_NUMBERS
    if kind.turned:
        return product(kind.scale) * follow_rings(kind, weights.codes)
    codes = weights.codes.astype(np.float64) - kind.zero
    if table is not None:
        codes = table[weights.codes].astype(np.float64)
    low = product(kind.low) if kind.low else 0.0
    return product(kind.scale) * codes - low


def follow_rings(kind: Kind, codes: NDArray[np.uint8]) -> Doubles:
    """Return the numbers of EXL3's codes [out, in]: of each and the codes before it in its ring."""
    wanted, inputs = codes.shape
    codes = np.pad(codes, ((0, -wanted % 16), (0, 0)))
    outputs = len(codes)
    # Of a ring: two halves of outputs, eight outputs, four turns, four codes.
    rows = codes.reshape(outputs // 16, 2, 8, inputs // 16, 4, 4).transpose(0, 3, 2, 4, 1, 5)
    rings = rows.reshape(*rows.shape[:2], 256).astype(np.int64)
    states = np.zeros_like(rings)
    for back in range(-(-16 // kind.bits)):
        states |= np.roll(rings, back, -1) << kind.bits * back
    numbers = list_numbers(BY_NAME[str(kind.floating)])[states & 0xFFFF].reshape(rows.shape)
    found: Doubles = numbers.transpose(0, 4, 2, 1, 3, 5).reshape(outputs, inputs)[:wanted]
    return found


def store_rows(multiplier: Multiplier, x: NDArray[np.float32]) -> tuple[NDArray[np.uint8], Doubles]:
    """Return rows as a multiplier reads them, and their values after rounding; x [rows, in]."""
    if multiplier.digits:
        return store_digits(x, multiplier.digits)
    if not multiplier.kind.floating:
        return store_activations(x, multiplier.active_bits)
    given = to_bfloat16(x) if multiplier.active_bits == 16 else np.ascontiguousarray(x)
    stored = allocate_zeroed((len(x) + SPARE_ROWS, given.nbytes // len(x)))[: len(x)]
    stored[:] = given.view(np.uint8)
    return stored, to_float32(given).astype(np.float64)


def store_digits(x: NDArray[np.float32], digits: int) -> tuple[NDArray[np.uint8], Doubles]:
    """Return rows as bytes with a scale, and their values; x [rows, in]."""
    rows, inputs = x.shape
    limit = np.float32((1 << 8 * digits - 1) - 1)
    most = np.abs(x).max(axis=1, keepdims=True)
    with np.errstate(divide="ignore"):
        inverse = np.where(most > 0, limit / most, np.float32(0))
    whole, scale = np.rint(x * inverse).astype(np.int32), most / limit
    unsigned = whole + (DIGIT_ZERO << 8 * (digits - 1))
    stored = allocate_zeroed((rows + SPARE_ROWS, digits * inputs + FACTS_BYTES))[:rows]
    for digit in range(digits):
        place = slice(digit * inputs, (digit + 1) * inputs)
        stored[:, place] = unsigned >> 8 * (digits - 1 - digit) & 255
    stored[:, digits * inputs :][:, :4] = scale.view(np.uint8)
    return stored, whole * scale.astype(np.float64)


def store_activations(x: NDArray[np.float32], bits: int) -> tuple[NDArray[np.uint8], Doubles]:
    """Return rows quantised to integers, and their values; x [rows, in]."""
    rows = len(x)
    blocks = x.reshape(rows, -1, BLOCK_INPUTS)
    most = np.float32((1 << (bits - 1)) - 1)
    largest = np.abs(blocks).max(axis=2, keepdims=True)
    with np.errstate(divide="ignore"):
        inverse = np.where(largest > 0, most / largest, np.float32(0))
    whole = np.rint(blocks * inverse).astype(np.int32)
    scale = (largest / most)[..., 0]
    halves = whole.reshape(rows, -1, 2, BLOCK_INPUTS // 2).sum(axis=3)
    both = halves.sum(axis=2)
    spacious = allocate_zeroed((rows + SPARE_ROWS, blocks.shape[1], active_block_bytes(bits)))
    stored = spacious[:rows]
    codes = whole.reshape(*whole.shape[:2], -1, 4)
    codes = codes if bits == 8 else codes[..., [0, 2, 1, 3]]
    codes = np.ascontiguousarray(codes, np.int8 if bits == 8 else np.int16)
    size = BLOCK_INPUTS * bits // 8
    stored[..., :size] = codes.view(np.uint8).reshape(*stored.shape[:2], size)
    facts = [
        np.stack([scale, scale * both.astype(np.float32)], axis=2).view(np.uint8),
        np.ascontiguousarray(
            -MOST_ZERO * np.concatenate([both[..., None], halves], axis=2), np.int32
        ).view(np.uint8),
    ]
    stored[..., size:] = np.concatenate(facts, axis=2)
    return stored.reshape(rows, -1), (whole * scale[..., None].astype(np.float64)).reshape(x.shape)


def multiply(
    kernel: PanelKernel, weights: Codes, span: int, stored: NDArray[np.uint8], mode: int = DIRECT
) -> NDArray[np.float32]:
    """Return stored activations [rows, ...] times weights, [rows, out].

    `mode`: how a panel is used, see `DIRECT`.
    """
    kind = kernel.multiplier.kind
    outputs, inputs = weights.codes.shape
    count, size = -(-outputs // PANEL), kind.panel_bytes(inputs, span)
    # The kernels prefetch beyond the end, which is harmless.
    panels = allocate_zeroed((count, size))
    fill_panels(panels, kind, weights, span)
    room = allocate_zeroed((kernel.room_bytes(inputs),))
    sums = allocate_zeroed((len(stored), count, PANEL), np.float32)
    part = allocate_zeroed((len(stored) + SPARE_ROWS, PANEL), np.float32)
    for panel in range(count):
        kernel.code(
            len(stored), address(stored), stored.strides[0], address(panels[panel]),
            inputs // BLOCK_INPUTS, span // BLOCK_INPUTS, size, mode, address(room), address(part),
        )  # fmt: skip
        sums[:, panel] = part[: len(stored)]
    return sums.reshape(len(stored), -1)[:, :outputs]
