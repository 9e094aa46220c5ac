"""EXL3 in kernels: numbers of a trellis, and the turns around them.

    y = output scales * H (numbers (H (input scales * x))) / 128, H Hadamard's matrix of 128

`checkpoint/formats/exl3.py` describes rings, states and codebooks, and
`layers/linears/stored_trellis.py` how the words of rings lie. A *run* is neighbours in a ring that
belong to one output: four inputs, or two where the states of four would not fit into a word. A
run's *window* is the 32 bits that end with it, in which its states begin at places that all runs
have in common. A *block* is 128 inputs of 128 outputs: what is turned together. Its inputs are
taken in the order in which rings pass them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.checkpoint.formats import exl3
from tgi_trio.shard.checkpoint.formats.exl3 import BY_NAME, INST3

# The 128 that both turns share: inputs are neither too large for float16 nor, nearly, too small.
BEFORE = tl.constexpr(1 / 8)
BEHIND = tl.constexpr(1 / 16)
MORE = tl.constexpr(INST3.more)
KEPT, SET = tl.constexpr(exl3.KEPT), tl.constexpr(exl3.SET)
# Exact in float32, with any sum of bytes.
STEP = tl.constexpr(exl3.STEP / 2**exl3.SHIFT)
LOW = tl.constexpr(exl3.LOW / 2**exl3.SHIFT)


@triton.constexpr_function
def factor_of(book):
    """Return what a state is multiplied by."""
    return BY_NAME[book].factor


@triton.constexpr_function
def run_of(half_bits):
    """Return the weights of a run: the first one's 16 bits and those of the others are a window."""
    return 4 if 16 + 2 * half_bits - half_bits // 2 <= 32 else 2


@triton.constexpr_function
def behind_of(half_bits, count):
    """Return the bits of the last `count` weights of a run.

    Of half a bit, every second weight has one bit more than the one before it.
    """
    return count // 2 * half_bits + count % 2 * (half_bits - half_bits // 2)


@triton.jit
def read_windows(rings, at, HALF_BITS: tl.constexpr):
    """Return the windows of tiles, uint32 [.., 256 / run], in the order of rings.

    `rings`: the words of some tiles, int32; `at`: int32 [.., 1], where each of them begins.
    """
    run: tl.constexpr = run_of(HALF_BITS)
    words: tl.constexpr = 4 * HALF_BITS
    end = (tl.arange(0, 256 // run) + 1) * (run * HALF_BITS // 2)  # bits of a ring up to there
    last = (end - 1) // 32
    high = tl.load(rings + (at + (last + words - 1) % words)).to(tl.uint32, bitcast=True)
    low = tl.load(rings + (at + last)).to(tl.uint32, bitcast=True)
    both = (high.to(tl.uint64) << 32) | low.to(tl.uint64)
    return (both >> ((32 * words - end) % 32).to(tl.uint64)).to(tl.uint32)


@triton.jit
def find_numbers(window, place: tl.constexpr, HALF_BITS: tl.constexpr, BOOK: tl.constexpr):
    """Return the numbers of the weights that are at a place of the windows' runs, float16."""
    behind: tl.constexpr = behind_of(HALF_BITS, run_of(HALF_BITS) - 1 - place)
    product = ((window >> behind) & 0xFFFF) * factor_of(BOOK)
    if BOOK == "mul1":
        two = (product & 0x00FF00FF) + ((product >> 8) & 0x00FF00FF)
        total = ((two * 0x10001) >> 16).to(tl.float32)  # a sum takes ten bits
        return (total * STEP - LOW).to(tl.float16)
    else:
        if BOOK == "3inst":
            product += MORE
        pairs = (product & KEPT) ^ SET
        low = pairs.to(tl.uint16).to(tl.float16, bitcast=True)
        return low + (pairs >> 16).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def read_tile(rings, at, HALF_BITS: tl.constexpr, BOOK: tl.constexpr):
    """Return the numbers of tiles as a matrix float16 [16 * A, 16 * B]; `at`: int32 [A, B, 1]."""
    run: tl.constexpr = run_of(HALF_BITS)
    below: tl.constexpr = at.shape[0]
    beside: tl.constexpr = at.shape[1]
    window = read_windows(rings, at, HALF_BITS)
    first = find_numbers(window, 0, HALF_BITS, BOOK)
    second = find_numbers(window, 1, HALF_BITS, BOOK)
    if run == 4:
        first = tl.join(first, find_numbers(window, 2, HALF_BITS, BOOK))
        second = tl.join(second, find_numbers(window, 3, HALF_BITS, BOOK))
    number = tl.reshape(tl.join(first, second), [below, beside, 8, 4, 2, 4])
    return tl.reshape(tl.trans(number, (0, 4, 2, 1, 3, 5)), [16 * below, 16 * beside])


@triton.jit
def turn(x):
    """Return rows [R, 128] times Hadamard's matrix of 128, as Sylvester builds it."""
    rows: tl.constexpr = x.shape[0]
    for _ in tl.static_range(7):  # the first bit of a place becomes the last, until all have been
        low, high = tl.split(tl.trans(tl.reshape(x, [rows, 2, 64]), (0, 2, 1)))
        x = tl.reshape(tl.join(low + high, low - high), [rows, 128])
    return x


@triton.jit
def read_turned(x, scales, k, inputs):
    """Return inputs `k` [1, 128] of rows, times their scales and turned, float32 [R, 128].

    `x`: pointers to rows [R, 1]; `scales`: float16 [inputs, padded].
    """
    return turn_scaled(tl.load(x + k, mask=k < inputs, other=0.0).to(tl.float32), scales, k)


@triton.jit
def turn_scaled(a, scales, k):
    """Return inputs `a` [R, 128], which are the `k`-th [1, 128], times their scales and turned."""
    return turn(a * tl.load(scales + k).to(tl.float32)) * BEFORE


@triton.jit
def place_inputs(k, i):
    """Return where inputs `k` are written that are the i-th of 128: in the order of rings."""
    return k - i % 16 + i % 8 // 2 * 4 + i % 16 // 8 * 2 + i % 2
