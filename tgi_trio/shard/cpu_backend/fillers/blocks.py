"""Reading a block of each GGUF type in LLVM IR, as `kinds/blocks_of_*.py` do with numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import llvmlite.ir as ir

from tgi_trio.shard.cpu_backend.fillers.words import (
    I8,
    I16,
    I32,
    WORDS,
    Source,
    bytes_of,
    digits_of,
    every_byte,
    join,
    masked,
    nibbles,
    part,
)

_GROUPS: Final = range(8)  # of 32 inputs, in a block of 256
_SPREAD: Final = 0x00204081  # times 4 bits: one bit in each byte, its lowest once it is masked
_SIGN: Final = 0x8000  # the sign bit of a float16


@dataclass(frozen=True, slots=True)
class Read:
    """The contents of a block, as values in the compiled program."""

    codes: Sequence[Any]  # for each group of 32 inputs: 8 words whose bytes are the codes
    # For every field of the kind: one number of a span, or one for each part of each group.
    numbers: Mapping[str, Sequence[Any]]


def _fifths(source: Source, first: int) -> Any:
    """Return the fifth bits of 32 codes, lowest first: 16 or 0 in each byte."""
    builder, kind = source.builder, ir.VectorType(I32, WORDS)
    bits = part(builder, source.words(first, 1), [0] * WORDS)
    four = builder.lshr(bits, ir.Constant(kind, [4 * word for word in range(WORDS)]))
    four = builder.and_(four, ir.Constant(kind, [15] * WORDS))
    spread = builder.mul(four, ir.Constant(kind, [_SPREAD] * WORDS))
    return builder.shl(masked(builder, spread, 0, 1), ir.Constant(kind, [4] * WORDS))


def _low(source: Source, first: int) -> Any:
    """Return the smallest weight with its sign changed, since the kernels subtract it."""
    return source.builder.xor(source.half(first), ir.Constant(I16, _SIGN))


def read_q4_0(source: Source) -> Read:
    return Read([nibbles(source.builder, source.words(2, 4))], {"d": [source.half(0)]})


def read_q4_1(source: Source) -> Read:
    codes = nibbles(source.builder, source.words(4, 4))
    return Read([codes], {"d": [source.half(0)], "low": [_low(source, 2)]})


def read_q5_0(source: Source) -> Read:
    codes = nibbles(source.builder, source.words(6, 4))
    return Read(
        [source.builder.or_(codes, _fifths(source, 2))],
        {"d": [source.half(0)]},
    )


def read_q5_1(source: Source) -> Read:
    codes = nibbles(source.builder, source.words(8, 4))
    return Read(
        [source.builder.or_(codes, _fifths(source, 4))],
        {"d": [source.half(0)], "low": [_low(source, 2)]},
    )


def read_q8_0(source: Source) -> Read:
    words = source.words(2)
    return Read([source.builder.xor(words, every_byte(words, 128))], {"d": [source.half(0)]})


def read_mxfp4(source: Source) -> Read:
    builder, exponent = source.builder, source.byte(0)
    least = builder.select(builder.icmp_unsigned("==", exponent, I8(0)), I8(1), exponent)
    codes = nibbles(builder, source.words(1, 4))
    return Read([codes], {"exponent": [builder.sub(least, I8(1))]})


def _scales_and_lows(source: Source, first: int) -> dict[str, list[Any]]:
    """Return 8 scales and 8 lows of 6 bits each from 12 bytes."""
    builder = source.builder
    one, two, three = (source.words(first + 4 * place, 1) for place in range(3))
    scales, lows = (
        bytes_of(
            builder,
            join(
                builder,
                masked(builder, own, 0, 63),
                builder.or_(masked(builder, three, right, 15), masked(builder, own, 2, 48)),
            ),
        )
        for own, right in ((one, 0), (two, 4))
    )
    return {"scales": scales, "lows": lows}


def _four_bits(source: Source, first: int) -> list[Any]:
    """Return the codes of 8 groups: the low nibbles of 32 bytes, then the high ones."""
    words = [source.words(first + 32 * place) for place in range(4)]
    return [masked(source.builder, words[group // 2], 4 * (group % 2), 15) for group in _GROUPS]


def _two_bits(source: Source, first: int, left: int = 0) -> list[Any]:
    """Return 2 bits for each input of 8 groups, shifted left by `left` bits."""
    words = [source.words(first), source.words(first + 32)]
    return [
        masked(source.builder, words[group // 4], 2 * (group % 4) - left, 3 << left)
        for group in _GROUPS
    ]


def _bits(source: Source, first: int, left: int) -> list[Any]:
    """Return 1 bit for each input of 8 groups: bit g of a byte belongs to group g."""
    words = source.words(first)
    return [masked(source.builder, words, group - left, 1 << left) for group in _GROUPS]


def _both(builder: Any, low: Sequence[Any], high: Sequence[Any]) -> list[Any]:
    return [builder.or_(a, b) for a, b in zip(low, high, strict=True)]


def read_q4_k(source: Source) -> Read:
    halves = {"d": [source.half(0)], "least": [source.half(2)]}
    return Read(_four_bits(source, 16), halves | _scales_and_lows(source, 4))


def read_q5_k(source: Source) -> Read:
    halves = {"d": [source.half(0)], "least": [source.half(2)]}
    codes = _both(source.builder, _four_bits(source, 48), _bits(source, 16, 4))
    return Read(codes, halves | _scales_and_lows(source, 4))


def read_q6_k(source: Source) -> Read:
    builder = source.builder
    words = [source.words(32 * place) for place in range(4)]
    low = [
        masked(builder, words[group // 4 * 2 + group % 2], group % 4 // 2 * 4, 15)
        for group in _GROUPS
    ]
    scales = bytes_of(builder, source.words(192, 4))
    codes = _both(builder, low, _two_bits(source, 128, 4))
    return Read(codes, {"d": [source.half(208)], "scales": scales})


def read_q2_k(source: Source) -> Read:
    builder, packed = source.builder, source.words(0, 4)
    numbers = {
        "d": [source.half(80)],
        "least": [source.half(82)],
        "scales": bytes_of(builder, masked(builder, packed, 0, 15)),
        "lows": bytes_of(builder, masked(builder, packed, 4, 15)),
    }
    return Read(_two_bits(source, 16), numbers)


def _less(builder: Any, scales: Sequence[Any]) -> list[Any]:
    """Return 6-bit scales as numbers from -32 to 31."""
    return [builder.sub(scale, I8(32)) for scale in scales]


def read_q3_k(source: Source) -> Read:
    builder = source.builder
    codes = _both(builder, _two_bits(source, 32), _bits(source, 0, 2))
    four = every_byte(codes[0], 4)
    low, high = nibbles(builder, source.words(96, 2)), source.words(104, 1)
    upper = [masked(builder, high, 2 * place - 4, 48) for place in range(4)]
    upper = [join(builder, *upper[:2]), join(builder, *upper[2:])]
    scales = bytes_of(builder, builder.or_(low, join(builder, *upper)))
    return Read(
        [builder.add(each, four) for each in codes],
        {"d": [source.half(108)], "scales": _less(builder, scales)},
    )


def read_iq4_xs(source: Source) -> Read:
    builder, upper = source.builder, source.half(2)
    packed = [source.byte(4 + place) for place in range(4)]
    scales = []
    for group in _GROUPS:
        low = packed[group // 2]
        low = builder.lshr(low, I8(4)) if group % 2 else builder.and_(low, I8(15))
        high = builder.trunc(builder.lshr(upper, ir.Constant(I16, 2 * group)), I8)
        scales.append(builder.or_(low, builder.shl(builder.and_(high, I8(3)), I8(4))))
    codes = [nibbles(builder, source.words(8 + 16 * group, 4)) for group in _GROUPS]
    return Read(codes, {"d": [source.half(0)], "scales": _less(builder, scales)})


def read_tq2_0(source: Source) -> Read:
    return Read(_two_bits(source, 0), {"d": [source.half(64)]})


def read_tq1_0(source: Source) -> Read:
    """Five digits of 32 bytes, five of 16 bytes, four of 4 bytes."""
    builder = source.builder
    first, second, last = source.words(0), source.words(32, 4), source.words(48, 1)
    codes = [digits_of(builder, first, place) for place in range(5)]
    halves = [digits_of(builder, second, place) for place in range(5)]
    quarters = [digits_of(builder, last, place) for place in range(4)]
    halves.append(join(builder, join(builder, *quarters[:2]), join(builder, *quarters[2:])))
    codes += [join(builder, *halves[place : place + 2]) for place in range(0, 6, 2)]
    return Read(codes, {"d": [source.half(52)]})


READERS: Final[dict[str, Callable[[Source], Read]]] = {
    "Q4_0": read_q4_0,
    "Q4_1": read_q4_1,
    "Q5_0": read_q5_0,
    "Q5_1": read_q5_1,
    "Q8_0": read_q8_0,
    "Q2_K": read_q2_k,
    "Q3_K": read_q3_k,
    "Q4_K": read_q4_k,
    "Q5_K": read_q5_k,
    "Q6_K": read_q6_k,
    "IQ4_NL": read_q4_0,
    "IQ4_XS": read_iq4_xs,
    "MXFP4": read_mxfp4,
    "TQ1_0": read_tq1_0,
    "TQ2_0": read_tq2_0,
}
