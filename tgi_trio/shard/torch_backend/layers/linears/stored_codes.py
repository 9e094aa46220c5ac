"""Quantised matrices in the layout that kernels read: the table of kinds, and how bytes lie.

Codes are stored in units of 16 bytes, which a thread reads at once; inputs are padded to whole
units. Codes of 8 bits are in the order of their inputs. Others are spread over four words, as
`kernels/linears/code_numbers.py` describes; the upper bits of 5- and 6-bit codes are in planes of
their own. Scales and lows are [outputs, runs].
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tgi_trio.shard.checkpoint.formats.fp8 import E4M3_NUMBERS
from tgi_trio.shard.checkpoint.numbers import Floats
from tgi_trio.shard.checkpoint.unpacked import UnpackedMatrix

Numbers = Literal["whole", "signed", "table", "e4m3"]
Lows = Literal["", "constant", "zeros", "lows"]
Array = NDArray[Any]


class CodeKind(NamedTuple):
    """How codes are stored, and the numbers that they stand for."""

    bits: int
    numbers: Numbers

    @property
    def low(self) -> int:
        """Return the bits of a code that are not in planes."""
        return 4 if self.bits in (5, 6) else self.bits

    @property
    def unit(self) -> int:
        """Return the inputs in a unit."""
        return _UNIT // self.low


KINDS: Final[Mapping[str, CodeKind]] = {
    "u2": CodeKind(2, "whole"),  # GPTQ of 2 bits, Q2_K, TQ1_0, TQ2_0, BitNet
    # GPTQ, AWQ, compressed-tensors, int4, Q4_0, Q4_1, Q4_K; of 3 bits GPTQ and Q3_K
    "u4": CodeKind(4, "whole"),
    "u5": CodeKind(5, "whole"),  # Q5_0, Q5_1, Q5_K
    "u6": CodeKind(6, "whole"),  # Q6_K
    "u8": CodeKind(8, "whole"),  # GPTQ and compressed-tensors of 8 bits
    "i8": CodeKind(8, "signed"),  # bitsandbytes, eetq, w8a8, Q8_0
    "t4": CodeKind(4, "table"),  # NF4, FP4, IQ4_NL, IQ4_XS, MXFP4, NVFP4
    "e4m3": CodeKind(8, "e4m3"),  # FP8 of all sorts
}
# The tensors of a matrix, in the order of the kernels' arguments.
TENSORS: Final = ("codes", "planes", "scales", "bases", "lows", "low_bases", "table", "order")
_WIDEST, _NARROWEST = 128, 16  # inputs of a run in the kernel's layout: powers of two
_UNIT: Final = 128  # bits of a unit, which a thread reads at once
_WHOLE: Final = (("u2", 4), ("u4", 16), ("u5", 32), ("u6", 64))  # kind, first code beyond it


class CodeLayout(NamedTuple):
    """What matrices must have in common to be multiplied in one launch."""

    kind: str
    inputs: int
    units: int  # of all inputs, the last one padded
    group: int  # inputs of a run; 0: all of them
    lows: Lows
    zero: int  # the zero point, where lows are "constant"
    nested: int  # runs that share a base; 0: scales are plain numbers
    dtypes: tuple[torch.dtype, ...]  # of scales and lows, if there are any

    @property
    def width(self) -> int:
        """Return the inputs of all units, padding included."""
        return self.units * KINDS[self.kind].unit


@dataclass(frozen=True, slots=True)
class Codes:
    """A matrix [outputs, inputs]; its tensors are described by `make_weights`."""

    form: CodeLayout
    outputs: int
    codes: torch.Tensor
    scales: torch.Tensor
    planes: torch.Tensor | None = None
    bases: torch.Tensor | None = None
    lows: torch.Tensor | None = None
    low_bases: torch.Tensor | None = None
    table: torch.Tensor | None = None
    order: torch.Tensor | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that there are, by name."""
        found = {name: getattr(self, name) for name in TENSORS}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    @property
    def sort(self) -> tuple[CodeLayout, int, bool]:
        """Return what determines the launch of a product with this matrix."""
        return self.form, self.outputs, self.order is not None

    @property
    def written(self) -> int:
        """Return the inputs of the matrix when it is written as numbers.

        If the inputs are in another order, padding is written as well.
        """
        return self.form.inputs if self.order is None else self.form.width

    def to(self, device: torch.device) -> Codes:
        moved: dict[str, Any] = {k: tensor.to(device) for k, tensor in self.tensors().items()}
        return replace(self, **moved)

    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())


def join(parts: Sequence[Codes]) -> list[Codes]:
    """Return matrices, with neighbours of the same form joined into one."""
    joined: list[Codes] = []
    for codes in parts:
        if joined and _are_alike(joined[-1], codes):
            joined[-1] = _below([joined[-1], codes])
        else:
            joined.append(codes)
    return joined


def stack(every: Sequence[Codes]) -> Codes | None:
    """Return matrices stacked along the outputs; None if they differ in form.

    Scales that are float16 in some and float32 in others become float32 in all.
    """
    if any(torch.float32 in codes.form.dtypes for codes in every):
        every = [_widen(codes) for codes in every]
    return _below(every) if all(_are_alike(every[0], codes) for codes in every) else None


def split(whole: Codes, like: Sequence[Codes]) -> list[Codes]:
    """Return views of `whole`, which has been stacked of matrices `like` these."""
    tensors, ends = whole.tensors(), dict.fromkeys(whole.tensors(), 0)
    found = []
    for codes in like:
        own: dict[str, Any] = {}
        for name, tensor in codes.tensors().items():
            if name in ("table", "order"):
                own[name] = tensors[name]
                continue
            begin, ends[name] = ends[name], ends[name] + len(tensor)
            own[name] = tensors[name][begin : ends[name]]
        found.append(replace(codes, **own))
    return found


def _widen(codes: Codes) -> Codes:
    """Return the same matrix with float16 scales and lows as float32."""
    changed: dict[str, Any] = {
        name: head.float()
        for name, head in (("scales", codes.scales), ("lows", codes.lows))
        if head is not None and head.dtype is torch.float16
    }
    dtypes = (torch.float32 if d is torch.float16 else d for d in codes.form.dtypes)
    return replace(codes, form=codes.form._replace(dtypes=tuple(dtypes)), **changed)


def _are_alike(one: Codes, other: Codes) -> bool:
    pairs = ((one.order, other.order), (one.table, other.table))
    return one.form == other.form and all(_are_same(*pair) for pair in pairs)


def _are_same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def _below(every: Sequence[Codes]) -> Codes:
    """Return matrices of the same form stacked along the outputs."""
    made: dict[str, Any] = {
        name: torch.cat([codes.tensors()[name] for codes in every])
        for name in every[0].tensors()
        if name not in ("table", "order")
    }
    return replace(every[0], outputs=sum(codes.outputs for codes in every), **made)


def encode(parts: UnpackedMatrix) -> Codes | None:
    """Return a matrix in the kernel's layout, on the host.

    None for runs of a size that the kernel does not have, and if 16 does not divide the inputs.
    """
    inputs = parts.codes.shape[1]
    if inputs % _NARROWEST:
        return None
    parts, size, order = _in_runs(parts)
    group = 0 if parts.scales.shape[1] == 1 else math.gcd(size, _WIDEST)
    if 0 < group < _NARROWEST:
        return None
    kind = _kind_of(parts)
    codes = torch.from_numpy(np.ascontiguousarray(parts.codes)).view(torch.uint8)
    units = -(-codes.shape[1] // KINDS[kind].unit)
    width = units * KINDS[kind].unit
    heads = _Heads.of(parts, size // group if group else 1)
    found = heads.laid(-(-width // group) if group else 1)
    codes = torch.nn.functional.pad(codes, (0, width - codes.shape[1]))
    packed, planes = _pack(codes, KINDS[kind])
    if KINDS[kind].numbers == "table":
        found["table"] = np.array(parts.table, np.float32)
    if order is not None:
        filled = np.full(width, -1, np.int32)
        filled[: len(order)] = order
        found["order"] = filled
    tensors = {name: torch.from_numpy(array) for name, array in found.items()}
    if planes is not None:
        tensors["planes"] = planes
    dtypes = tuple(tensors[name].dtype for name in ("scales", "lows") if name in tensors)
    form = CodeLayout(kind, inputs, units, group, heads.how, heads.zero, heads.together, dtypes)
    return Codes(form, len(packed), packed, **tensors)


@dataclass(frozen=True, slots=True)
class _Heads:
    """Scales and lows of runs, [outputs, runs] each, as they will be stored."""

    scales: Array
    lows: Array | None
    how: Lows
    zero: int
    bases: Floats | None
    low_bases: Floats | None
    repeats: int  # runs in the kernel's layout for each of these
    together: int  # runs in the kernel's layout that share a base

    @classmethod
    def of(cls, parts: UnpackedMatrix, repeats: int) -> _Heads:
        """Keep nested scales where there are any, and zero points where lows amount to them."""
        scales, nested = parts.scales, parts.nested
        lows: Array | None = parts.lows
        how: Lows = "" if lows is None else "lows"
        low_bases, zero = None, 0
        if lows is not None:
            zeros = _zero_points(scales, lows)
            if zeros is not None:
                first = int(zeros.flat[0])
                if (zeros == first).all():
                    how, zero, lows = ("constant" if first else ""), first, None
                else:
                    how, lows = "zeros", zeros
            elif parts.nested_lows is not None:
                lows, low_bases = parts.nested_lows.steps, parts.nested_lows.units
            else:
                nested = None  # plain lows go with plain scales
        if nested is None:
            return cls(scales, lows, how, zero, None, None, repeats, 0)
        together = scales.shape[1] // nested.units.shape[1] * repeats
        return cls(nested.steps, lows, how, zero, nested.units, low_bases, repeats, together)

    def laid(self, runs: int) -> dict[str, Array]:
        """Return the arrays that there are as [outputs, runs], by the kernel's number of runs."""
        blocks = -(-runs // self.together) if self.together else 0
        every = {
            "scales": (self.scales, self.repeats, runs),
            "lows": (self.lows, self.repeats, runs),
            "bases": (self.bases, 1, blocks),
            "low_bases": (self.low_bases, 1, blocks),
        }
        return {
            name: _small(_lay(head, repeats, count))
            for name, (head, repeats, count) in every.items()
            if head is not None
        }


def _in_runs(parts: UnpackedMatrix) -> tuple[UnpackedMatrix, int, NDArray[np.int32] | None]:
    """Return a matrix whose runs have one size, except perhaps the last, and that size.

    Where inputs are in another order, each run is padded to the longest; the third result is the
    input at each place, -1 for padding.
    """
    order, (outputs, inputs), runs = parts.order, parts.codes.shape, parts.scales.shape[1]
    if order is None:
        return parts, inputs // runs, None
    counts = np.bincount(order, minlength=runs)
    if np.array_equal(order, np.arange(inputs) // max(1, counts[0])):
        return parts, int(counts[0]), None
    size = -(-int(counts.max()) // _NARROWEST) * _NARROWEST
    if size > _NARROWEST:
        size = -(-size // (2 * _NARROWEST)) * 2 * _NARROWEST
    by_run = np.argsort(order, kind="stable")
    first = np.cumsum(counts) - counts
    target = order[by_run] * size + np.arange(inputs) - first[order[by_run]]
    found = np.full(runs * size, -1, np.int32)
    found[target] = by_run
    codes = np.zeros((outputs, runs * size), parts.codes.dtype)
    codes[:, target] = parts.codes[:, by_run]
    return replace(parts, codes=codes, order=None), size, found


def _kind_of(parts: UnpackedMatrix) -> str:
    if parts.table is not None:
        return "e4m3" if len(parts.table) == len(E4M3_NUMBERS) else "t4"
    if parts.codes.dtype == np.int8:
        return "i8"
    largest = int(parts.codes.max(initial=0))
    return next((kind for kind, end in _WHOLE if largest < end), "u8")


def _zero_points(scales: Floats, lows: Floats) -> Array | None:
    """Return integer zero points: lows divided by scales, if those are integers, else None.

    Where a scale is zero any zero point does, so it takes one of the others.
    """
    others = (lows[scales != 0][:1] / scales[scales != 0][:1]).sum()
    zeros = np.rint(np.divide(lows, scales, out=np.full_like(lows, others), where=scales != 0))
    if not np.array_equal(zeros * scales, lows):
        return None
    for dtype in (np.uint8, np.int8):
        whole = zeros.astype(dtype)
        if np.array_equal(whole, zeros):
            return whole
    return None


def _lay(head: Array, repeats: int, count: int) -> Array:
    """Return [outputs, runs] as [outputs, count], with zeros beyond the last run."""
    every = np.repeat(head, repeats, axis=1)[:, :count]
    return np.ascontiguousarray(np.pad(every, ((0, 0), (0, count - every.shape[1]))))


def _small(head: Array) -> Array:
    """Return numbers as float16 if that is exact, else float32; integers as they are."""
    if head.dtype.kind != "f":
        return head
    with np.errstate(over="ignore"):
        half = head.astype(np.float16)
    return half if np.array_equal(half.astype(np.float32), head) else head.astype(np.float32)


def _pack(codes: torch.Tensor, kind: CodeKind) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return codes [outputs, padded inputs] as stored, and planes; see `code_numbers.py`."""
    if kind.bits == 8:
        return codes, None
    words = codes.view(len(codes), -1, kind.unit // 4, 4)  # i-th codes, words
    low = _pack_bits(words.transpose(2, 3) & ((1 << kind.low) - 1), kind.low)
    if kind.bits == 5:
        return low, _pack_bits(words >> 4, 1)
    if kind.bits == 6:
        return low, _pack_bits((words >> 4).unflatten(3, (2, 2)).transpose(2, 3), 2)
    return low, None


def _pack_bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return int32 [outputs, words] of codes [outputs, ...], packed from the lowest bits up."""
    each = 8 // bits  # codes in a byte
    codes = codes.reshape(len(codes), -1, each)
    packed = torch.zeros(codes.shape[:2], dtype=torch.uint8)
    for i in range(each):
        packed |= codes[..., i] << (i * bits)
    return packed.view(torch.int32)
