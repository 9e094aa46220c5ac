"""Matrices as exllamav3 stores them, made of any states at all, bit by bit."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from tests.support.quantised import Array, Store, Tensors

EXL3: dict[str, Any] = {"quant_method": "exl3", "version": "0.0.9", "bits": 4.0, "head_bits": 6}
FACTORS = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}


def store_exl3(bits: float, book: str = "3inst", *, signs: bool = False) -> Store:
    """Numbers do not approximate a weight: they are any, of its magnitude.

    `bits`: whole or half ones. `signs`: there are no scales, as in the first checkpoints, so that
    numbers are of magnitude 1 whatever the weight's: attention by such matrices all but chooses,
    and rounding of one weight in float32 can move logits by 1e-3.
    """

    def store(module: str, weight: Array) -> tuple[Tensors, Array]:
        rows, columns = weight.shape
        outputs, inputs = (-(-size // 128) * 128 for size in weight.shape)
        draw = np.random.default_rng(rows + columns)
        words, numbers = _fill_tiles(draw, inputs, outputs, bits, book)
        parts: Tensors = {"trellis": words}
        scales = []
        for letter, count in (("u", inputs), ("v", outputs)):
            flips = draw.choice([-1.0, 1.0], count)
            spread = float(np.std(weight)) if letter == "v" else 1.0
            own = (flips * spread * draw.uniform(0.6, 1.4, count)).astype(np.float16)
            parts[f"s{letter}h"] = torch.from_numpy(own)
            if signs:
                own = flips.astype(np.float16)
                parts[f"s{letter}"] = _pack_signs(parts.pop(f"s{letter}h"))
            scales.append(own.astype(np.float64))
        if book in FACTORS:
            parts[book] = torch.tensor(np.uint32(FACTORS[book]).view(np.int32))
        turned = _turn(numbers) * scales[0][:, None]
        exact = (_turn(turned.T) * scales[1][:, None])[:rows, :columns] / 128
        tensors = {f"{module}.{name}": part for name, part in parts.items()}
        return tensors, exact.astype(np.float32)

    return store


def _fill_tiles(
    draw: np.random.Generator, inputs: int, outputs: int, bits: float, book: str
) -> tuple[torch.Tensor, Array]:
    """Return words int16 [tiles, tiles, 16 * bits] of random rings, and their numbers."""
    tiles, length = (inputs // 16, outputs // 16), int(256 * bits)
    rings = draw.integers(0, 2, (*tiles, length))
    numbers = np.zeros((inputs, outputs))
    end = 0
    for place in range(256):
        end += int(bits) + (place % 2 if bits % 1 else 0)
        states = np.zeros(tiles, np.int64)
        for bit in range(end - 16, end):
            states = 2 * states + rings[:, :, bit % length]
        lane, i = divmod(place, 8)
        row = 2 * (lane % 4) + i % 2 + (8 if i in (2, 3, 6, 7) else 0)
        column = lane // 4 + (8 if i >= 4 else 0)
        numbers[row::16, column::16] = _codebook(book)[states]
    words = np.packbits(rings.astype(np.uint8), axis=-1).view(">u4").astype("<u4")
    return torch.from_numpy(words.view(np.int16).copy()), numbers


def number_of(state: int, book: str) -> float:
    """Return the number of a state, by the formula of a codebook."""
    if book == "mul1":
        product = state * FACTORS[book] % 2**32
        summed = 1024 + sum(product >> shift & 255 for shift in (0, 8, 16, 24))
        step, low = (float(np.uint16(bits).view(np.float16)) for bits in (0x1EEE, 0xC931))
        return float(np.float16(summed * step + low))
    product = state * 89226354 + 64248484 if book == "3inst" else state * FACTORS[book]
    total = 0.0
    for half in (product & 0xFFFF, product >> 16 & 0xFFFF):
        half = (half & 0x8FFF) ^ 0x3B60
        size = (1 + (half & 1023) / 1024) * 2.0 ** ((half >> 10 & 31) - 15)
        total += -size if half >> 15 else size
    return float(np.float16(total))


@cache
def _codebook(book: str) -> Array:
    return np.array([number_of(state, book) for state in range(1 << 16)])


def _turn(numbers: Array) -> Array:
    """Return Hadamard's matrix of 128 times every 128 rows."""
    matrix = np.ones((1, 1))
    for _ in range(7):
        matrix = np.kron(np.array([[1, 1], [1, -1]]), matrix)
    blocks = numbers.reshape(-1, 128, numbers.shape[1])
    return (matrix @ blocks).reshape(numbers.shape)


def _pack_signs(scales: torch.Tensor) -> torch.Tensor:
    negative = (scales.numpy() < 0).reshape(-1, 16)
    words = (negative << np.arange(16)).sum(1)
    return torch.from_numpy(words.astype(np.uint16).view(np.int16))
