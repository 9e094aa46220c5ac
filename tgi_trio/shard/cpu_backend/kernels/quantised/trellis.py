"""Numbers of EXL3's codes: a state is 16 bits of a ring, of which a codebook computes a number.

`kinds/rings.py` has the layout. Sixteen outputs are decoded at once. The chunk before one's own is
the other half's, so half a vector of the last chunks and half of these make the chunks before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import llvmlite.ir as ir

from tgi_trio.shard.checkpoint.formats.exl3 import BY_NAME, KEPT, LOW, SET, SHIFT, STEP, Codebook
from tgi_trio.shard.cpu_backend.kernels.emit import FLOATS, INTS, call, floats, ints
from tgi_trio.shard.cpu_backend.kernels.vectors import fma_of
from tgi_trio.shard.cpu_backend.kinds.rings import CHUNK
from tgi_trio.shard.cpu_backend.multiplier import Multiplier
from tgi_trio.shard.cpu_backend.weight_layout import LANES

_HALF: Final = LANES // 2
_STATE: Final = 16  # bits
_TILES: Final = 2  # of a block
_TURNS: Final = 4  # of a half in a ring
# The second half of one vector, then the first of another.
_BEFORE: Final = [_HALF + lane for lane in range(LANES)]
# The outputs before each, in its half: where a ring begins its last turns are theirs.
_NEXT_TO: Final = [lane // _HALF * _HALF + (lane - 1) % _HALF for lane in range(LANES)]
_HALF_BIAS: Final = 127 - 15  # float32's exponents have so much more bias than float16's
_DROPPED: Final = 13  # fraction bits of float32 that float16 lacks


def read_states(builder: Any, bits: int, words: Callable[[int], Any]) -> Iterator[Any]:
    """Yield the states of a block's 32 inputs, in a word for each output.

    `words`: returns one of a column's vectors of words.
    """
    for tile in range(_TILES):
        own = [_read_chunk(builder, bits, words, _TURNS * tile + turn) for turn in range(_TURNS)]

        def turned(turn: int, own: list[Any] = own) -> Any:
            if turn >= 0:
                return own[turn]
            return builder.shuffle_vector(own[turn], own[turn], ir.Constant(INTS, _NEXT_TO))

        def back(chunks: int, turn: int, turned: Callable[[int], Any] = turned) -> Any:
            """Return the chunk that is so many before one's own of a turn."""
            turn -= chunks // 2
            if chunks % 2 == 0:
                return turned(turn)
            lanes = ir.Constant(INTS, _BEFORE)
            return builder.shuffle_vector(turned(turn - 1), turned(turn), lanes)

        for turn in range(_TURNS):
            yield from _read_turn(builder, bits, back, turn)


def _read_chunk(builder: Any, bits: int, words: Callable[[int], Any], number: int) -> Any:
    size = CHUNK * bits
    word, shift = divmod(size * number, 32)
    chunk = builder.lshr(words(word), ints(shift)) if shift else words(word)
    if shift + size > 32:
        chunk = builder.or_(chunk, builder.shl(words(word + 1), ints(32 - shift)))
    return builder.and_(chunk, ints((1 << size) - 1)) if size < 32 else chunk


def _read_turn(
    builder: Any, bits: int, back: Callable[[int, int], Any], turn: int
) -> Iterator[Any]:
    """Yield the states of one chunk's codes."""
    size, own = CHUNK * bits, back(0, turn)
    if _STATE + size - bits <= 32:  # all states of the chunk are in one word
        history = own
        for chunks in range(1, -(-(_STATE - bits) // size) + 1):
            history = builder.or_(history, builder.shl(back(chunks, turn), ints(size * chunks)))
        joined = [(history, bits * (CHUNK - 1 - place)) for place in range(CHUNK)]
    else:  # the last two are in the chunk itself
        early = builder.lshr(own, ints(2 * bits))
        early = builder.or_(early, builder.shl(back(1, turn), ints(2 * bits)))
        joined = [(early, bits), (early, 0), (own, bits), (own, 0)]
    for word, shift in joined:
        state = builder.lshr(word, ints(shift)) if shift else word
        yield builder.and_(state, ints(0xFFFF))


def read_trellis(builder: Any, way: Multiplier, words: Callable[[int], Any]) -> Iterator[Any]:
    """Yield the float32 weights of a block's 32 inputs, in the order in which rings pass them."""
    book = BY_NAME[str(way.kind.floating)]
    for state in read_states(builder, way.kind.bits, words):
        product = builder.mul(state, ints(book.factor))
        exact = _add_bytes(builder, way, product) if book.adds_bytes else None
        yield _round(builder, exact or _add_halves(builder, book, product))


def _add_halves(builder: Any, book: Codebook, product: Any) -> Any:
    """Return the sum of both halves of words as float16 numbers, before it is rounded."""
    if book.more:
        product = builder.add(product, ints(book.more))
    pairs = builder.xor(builder.and_(product, ints(KEPT)), ints(SET))
    # A float16 number in the place of float32's bits has only the wrong exponent bias.
    shift, kept = 16 - _DROPPED, ints(0x8FFFE000)
    low = builder.and_(builder.ashr(builder.shl(pairs, ints(16)), ints(shift)), kept)
    high = builder.and_(builder.ashr(pairs, ints(shift)), kept)
    both = builder.fadd(builder.bitcast(low, FLOATS), builder.bitcast(high, FLOATS))
    return builder.fmul(both, floats(2.0**_HALF_BIAS))


def _add_bytes(builder: Any, way: Multiplier, product: Any) -> Any:
    """Return what the sum of four bytes stands for, exactly."""
    if way.dots == "vnni":
        name = "llvm.x86.avx512.vpdpbusd.512"
        sums = call(builder, name, INTS, ints(0), product, ints(0x01010101))
    else:
        even = ints(0x00FF00FF)
        two = builder.and_(builder.lshr(product, ints(8)), even)
        two = builder.add(builder.and_(product, even), two)
        sums = builder.and_(builder.add(two, builder.lshr(two, ints(16))), ints(0xFFFF))
    unit = 2.0**-SHIFT
    return fma_of(builder, builder.sitofp(sums, FLOATS), floats(STEP * unit), floats(-LOW * unit))


def _round(builder: Any, exact: Any) -> Any:
    """Round to float16, ties to even; no sum of a codebook is among its subnormal numbers."""
    bits = builder.bitcast(exact, INTS)
    odd = builder.and_(builder.lshr(bits, ints(_DROPPED)), ints(1))
    bits = builder.add(bits, builder.add(odd, ints((1 << (_DROPPED - 1)) - 1)))
    return builder.bitcast(builder.and_(bits, ints(-(1 << _DROPPED))), FLOATS)
