"""A compiled program that lays rows of blocks out as panels, and its compilation."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import llvmlite.binding as llvm
import llvmlite.ir as ir
import numpy as np
from numpy.typing import NDArray

from tgi_trio.model.gguf.block_types import BY_NAME
from tgi_trio.shard.cpu_backend.fillers.blocks import READERS, Read
from tgi_trio.shard.cpu_backend.fillers.words import (
    I8,
    I16,
    I32,
    I64,
    POINTER,
    WORDS,
    Source,
    any_of,
    masked,
    part,
)
from tgi_trio.shard.cpu_backend.kinds.kind import BLOCK_INPUTS, Field, Kind, fill_panels
from tgi_trio.shard.cpu_backend.kinds.table import KINDS
from tgi_trio.shard.cpu_backend.machine_code.object_files import (
    SYMBOL,
    MachineCode,
    file_name,
    make_object,
    open_object,
)
from tgi_trio.shard.cpu_backend.machine_code.store import find_or_make
from tgi_trio.shard.cpu_backend.weight_layout import PANEL

_ROW: Final = 4 * PANEL  # bytes of one word for each output of a panel
_EXPONENT: Final = 0x7C00  # the exponent bits of a float16, all set in infinities and NaN
_AHEAD: Final = (
    256  # bytes of a row to prefetch: 32 rows are more streams than hardware prefetchers follow
)
_ARGUMENTS: Final = 5


@dataclass(frozen=True, slots=True)
class Filler:
    """The compiled program for one GGUF type."""

    _code: MachineCode

    def fill(self, panels: NDArray[np.uint8], parts: Sequence[NDArray[np.uint8]]) -> bool:
        """Write blocks [out, blocks of a row, bytes] to `panels` uint8 [out / 32, bytes] of zeros.

        It does what `kinds.kind.fill_panels` does; the rows of two parts are interleaved. Other
        Other Python threads may run during that time. Returns False if a scale is infinite or NaN.
        """
        rows = np.zeros((-(-sum(map(len, parts)) // PANEL), PANEL), np.int64)  # 0: no row
        lanes = PANEL // len(parts)
        for place, own in enumerate(parts):
            begins = np.zeros(len(rows) * lanes, np.int64)
            begins[: len(own)] = own.ctypes.data + np.arange(len(own)) * own.strides[0]
            rows[:, place * lanes : (place + 1) * lanes] = begins.reshape(-1, lanes)
        where = panels.ctypes.data, rows.ctypes.data
        return not self._code(*where, len(rows), panels.strides[0], parts[0].shape[1])


def find_filler(coding: str) -> Filler | None:
    """Return the program for weights of a `StoredMatrix.coding`, or None: numpy has to do it.

    That is if there is no program for it, or if it fails its self-test on this machine.
    """
    if coding not in READERS:
        return None
    try:
        made = compile_filler(coding)
        fault = _find_fault(made, coding)
    except Exception as error:  # any error of LLVM: numpy does the work instead
        fault = f"{type(error).__name__}: {error}"
    if fault is None:
        return made
    print(f"weights of {coding} are packed with numpy: {fault}", file=sys.stderr)
    return None


def compile_filler(coding: str) -> Filler:
    """Load the program for one of `READERS`, or compile it; raises what LLVM raises."""
    kind = KINDS[coding].kind
    name = file_name(f"fillers.{coding}", kind)
    data = find_or_make(name, lambda: make_object(_write_module(coding, kind)))
    return Filler(open_object(data, _ARGUMENTS))


def _find_fault(filler: Filler, coding: str) -> str | None:
    """Compare a program with numpy on random blocks; return what is wrong, or None."""
    stored, (kind, read) = BY_NAME[coding], (KINDS[coding].kind, KINDS[coding].read)
    blocks = np.random.default_rng(1).integers(
        0, 256, (PANEL + 1, 2, stored.bytes), np.uint8, endpoint=False
    )
    span = kind.span or BLOCK_INPUTS
    panels, expected = np.zeros((2, 2, kind.panel_bytes(2 * stored.weights, span)), np.uint8)
    filler.fill(panels, [blocks])
    fill_panels(expected, kind, read({"blocks": blocks}), span)
    return None if np.array_equal(panels, expected) else "their codes are not where they belong"


def _write_module(coding: str, kind: Kind) -> ir.Module:
    """Write `fill(panels, rows, count, panel bytes, blocks of a row)`: 1 for a bad scale."""
    module = ir.Module()
    module.triple = llvm.get_process_triple()
    function = ir.Function(module, ir.FunctionType(I32, [I64] * _ARGUMENTS), SYMBOL)
    panels, rows, count, panel_bytes, blocks = function.args
    builder = ir.IRBuilder(function.append_basic_block())
    flag = builder.alloca(I32)
    builder.store(I32(0), flag)
    stored = BY_NAME[coding]
    groups = stored.weights // BLOCK_INPUTS
    block_bytes = kind.span_bytes + groups * kind.block_bytes
    with (
        _each(builder, count) as panel,
        _each(builder, blocks) as block,
        _each(builder, I64(PANEL)) as lane,
    ):
        place = builder.add(builder.mul(panel, I64(PANEL)), lane)
        row = builder.load(_pointer(builder, rows, builder.mul(place, I64(8))), typ=I64)
        with builder.if_then(builder.icmp_unsigned("!=", row, I64(0))):
            where = _pointer(builder, row, builder.mul(block, I64(stored.bytes)))
            _fetch(builder, where)
            read = READERS[coding](Source(builder, where))
            target = builder.add(
                builder.mul(panel, panel_bytes), builder.mul(block, I64(block_bytes))
            )
            writer = _Writer(builder, builder.add(panels, target), lane, flag)
            writer.write(kind, read)
    builder.ret(builder.load(flag, typ=I32))
    return module


def _pointer(builder: Any, where: Any, offset: Any) -> Any:
    return builder.inttoptr(builder.add(where, offset), POINTER)


def _fetch(builder: Any, where: Any) -> None:
    """Prefetch the memory `_AHEAD` bytes further on; harmless if nothing is mapped there."""
    kind = ir.FunctionType(ir.VoidType(), [POINTER, I32, I32, I32])
    prefetch = ir.Function(builder.module, kind, "llvm.prefetch.p0")
    later = builder.gep(where, [I64(_AHEAD)], source_etype=I8)
    builder.call(prefetch, [later, I32(0), I32(3), I32(1)])  # for reading, high locality, data


@contextmanager
def _each(builder: Any, count: Any) -> Iterator[Any]:
    """Write a loop over the numbers below `count`, which must not be 0."""
    before = builder.block
    body = builder.append_basic_block()
    builder.branch(body)
    builder.position_at_end(body)
    number = builder.phi(I64)
    number.add_incoming(I64(0), before)
    yield number
    following = builder.add(number, I64(1))
    number.add_incoming(following, builder.block)
    behind = builder.append_basic_block()
    builder.cbranch(builder.icmp_unsigned("<", following, count), body, behind)
    builder.position_at_end(behind)


@dataclass(frozen=True, slots=True)
class _Writer:
    """Writes the contents of a block to the place of one output in a panel."""

    builder: Any
    target: Any  # where the block begins in the panel
    lane: Any  # the output's index in the panel
    flag: Any  # set to 1 for a scale that is infinite or NaN

    def write(self, kind: Kind, read: Read) -> None:
        self._head(kind.span_head, read, 0, 0)
        for group, codes in enumerate(read.codes):
            first = kind.span_bytes + group * kind.block_bytes
            self._head(kind.head, read, group, first)
            self._codes(kind.bits, codes, first + kind.head_bytes)

    def _head(self, fields: tuple[Field, ...], read: Read, group: int, first: int) -> None:
        """Write the fields of a head, which begins at byte `first`."""
        for field in fields:
            for place in range(field.parts):
                number = read.numbers[field.name][group * field.parts + place]
                if field.number == "f2":
                    self._check(number)
                size = number.type.width // 8
                self._store(number, first + place * PANEL * size, size)
            first += field.bytes

    def _check(self, half: Any) -> None:
        builder, all_bits = self.builder, ir.Constant(I16, _EXPONENT)
        bad = builder.icmp_unsigned("==", builder.and_(half, all_bits), all_bits)
        found = builder.or_(builder.load(self.flag, typ=I32), builder.zext(bad, I32))
        builder.store(found, self.flag)

    def _codes(self, bits: int, codes: Any, first: int) -> None:
        """Write 32 codes as `kinds.kind._fill_codes` does."""
        builder = self.builder
        if bits == 8:
            self._words(codes, first)
            return
        if bits == 2:
            quarters = [part(builder, codes, range(word, word + 2)) for word in range(0, WORDS, 2)]
            shifted = [
                builder.shl(each, ir.Constant(each.type, [2 * place] * each.type.count))
                for place, each in enumerate(quarters)
            ]
            self._words(functools.reduce(builder.or_, shifted), first)
            return
        low = masked(builder, codes, 0, 15)
        upper = part(builder, low, range(4, WORDS))
        four = ir.Constant(upper.type, [4] * upper.type.count)
        packed = builder.or_(part(builder, low, range(4)), builder.shl(upper, four))
        self._words(packed, first)
        first += 4 * _ROW
        more = bits - 4  # bits beyond 4; a word of a plane has those of `each` words
        each = 8 // more if more else 0
        for plane in range(more):
            lanes = range(plane * each, (plane + 1) * each)
            high = masked(builder, part(builder, codes, lanes), 4, (1 << more) - 1)
            shifts = ir.Constant(high.type, [more * word for word in range(each)])
            self._store(any_of(builder, builder.shl(high, shifts)), first + plane * _ROW, 4)

    def _words(self, words: Any, first: int) -> None:
        for place in range(words.type.count):
            word = self.builder.extract_element(words, I32(place))
            self._store(word, first + place * _ROW, 4)

    def _store(self, value: Any, first: int, size: int) -> None:
        """Write a number of this output; `first`: the offset of the first output's number."""
        offset = self.builder.add(self.builder.mul(self.lane, I64(size)), I64(first))
        self.builder.store(value, _pointer(self.builder, self.target, offset))
