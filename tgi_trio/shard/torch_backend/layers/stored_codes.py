"""Quantised matrices as the kernel over codes reads them: the table of kinds, and how bytes lie.

Inputs come in steps. Kinds of 4 to 6 bits have the lower four of two codes in a byte: those of a
step's first half below those of its second; what 5 or 6 bits have above lies in planes of its own,
and codes of 2 bits lie as those do.
Scales and lows are [runs, outputs], so that those of a tile of outputs lie side by side.
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
from tgi_trio.shard.checkpoint.taken_apart import Parts

Numbers = Literal["whole", "signed", "table", "e4m3"]
Lows = Literal["", "constant", "zeros", "lows"]
Array = NDArray[Any]


class CodeKind(NamedTuple):
    """How a code lies, and what it stands for."""

    bits: int
    numbers: Numbers


KINDS: Final[Mapping[str, CodeKind]] = {
    "u2": CodeKind(2, "whole"),  # GPTQ of 2 bits, Q2_K
    # GPTQ, AWQ, compressed-tensors, int4, Q4_0, Q4_1, Q4_K; of 3 bits GPTQ and Q3_K
    "u4": CodeKind(4, "whole"),
    "u5": CodeKind(5, "whole"),  # Q5_0, Q5_1, Q5_K
    "u6": CodeKind(6, "whole"),  # Q6_K
    "u8": CodeKind(8, "whole"),  # GPTQ and compressed-tensors of 8 bits
    "i8": CodeKind(8, "signed"),  # bitsandbytes, eetq, w8a8, Q8_0
    "t4": CodeKind(4, "table"),  # NF4, FP4, IQ4_NL, IQ4_XS, MXFP4, NVFP4
    "e4m3": CodeKind(8, "e4m3"),  # FP8 of all sorts
}
_WIDEST, _NARROWEST = 128, 16  # inputs of a run, as the kernel looks at them: powers of two
_DEPTHS: Final = (64, 32)  # inputs multiplied together
_WHOLE: Final = (("u2", 4), ("u4", 16), ("u5", 32), ("u6", 64))  # by the first number beyond


class Form(NamedTuple):
    """What matrices that one launch multiplies have in common."""

    kind: str
    inputs: int
    steps: int  # that the inputs come in, the last filled up
    depth: int  # inputs multiplied together
    group: int  # inputs of a run; 0: all
    lows: Lows
    zero: int  # where lows are "constant"
    nested: int  # runs that share a unit; 0: scales are plain numbers
    dtypes: tuple[torch.dtype, ...]  # of scales and lows, where there are any

    @property
    def step(self) -> int:
        """Return the inputs of a step."""
        return self.depth * (1 if KINDS[self.kind].bits == 8 else 2)


@dataclass(frozen=True, slots=True)
class Codes:
    """A matrix [outputs, inputs]; tensors as `multiply_codes` describes them."""

    form: Form
    outputs: int
    codes: torch.Tensor
    scales: torch.Tensor
    planes: torch.Tensor | None = None
    units: torch.Tensor | None = None
    lows: torch.Tensor | None = None
    low_units: torch.Tensor | None = None
    table: torch.Tensor | None = None
    order: torch.Tensor | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return those that there are, by name."""
        names = ("codes", "planes", "scales", "units", "lows", "low_units", "table", "order")
        found = {name: getattr(self, name) for name in names}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def to(self, device: torch.device) -> Codes:
        moved: dict[str, Any] = {k: tensor.to(device) for k, tensor in self.tensors().items()}
        return replace(self, **moved)

    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())


def join(parts: Sequence[Codes]) -> list[Codes]:
    """Return matrices with those made one that are neighbours and alike."""
    joined: list[Codes] = []
    for codes in parts:
        if joined and _are_alike(joined[-1], codes):
            joined[-1] = _below([joined[-1], codes])
        else:
            joined.append(codes)
    return joined


def stack(every: Sequence[Codes]) -> Codes | None:
    """Return matrices one below the other as one; None where they are not alike.

    Scales that are float16 in some and float32 in others become float32 in all.
    """
    if any(torch.float32 in codes.form.dtypes for codes in every):
        every = [_widen(codes) for codes in every]
    return _below(every) if all(_are_alike(every[0], codes) for codes in every) else None


def _widen(codes: Codes) -> Codes:
    """Return the same with scales and lows of float16 as float32."""
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
    """Return matrices that are alike as one, with the outputs of all."""
    made: dict[str, Any] = {
        name: torch.cat(
            [codes.tensors()[name] for codes in every], dim=0 if name in ("codes", "planes") else 1
        )
        for name in every[0].tensors()
        if name not in ("table", "order")
    }
    return replace(every[0], outputs=sum(codes.outputs for codes in every), **made)


def encode(parts: Parts) -> Codes | None:
    """Return a matrix for the kernel, on the host; None where runs have no size that it knows, and
    for inputs that do not come by sixteen.
    """
    inputs = parts.codes.shape[1]
    if inputs % _NARROWEST:
        return None
    parts, size, order = _in_runs(parts)
    group = 0 if parts.scales.shape[1] == 1 else math.gcd(size, _WIDEST)
    if 0 < group < _NARROWEST:
        return None
    kind = _kind_of(parts)
    depth = next((depth for depth in _DEPTHS if not group or group >= depth), _DEPTHS[-1])
    step = depth * (1 if KINDS[kind].bits == 8 else 2)
    steps = -(-parts.codes.shape[1] // step)
    heads = _Heads.of(parts, size // group if group else 1)
    found = heads.laid(-(-steps * step // group) if group else 1)
    codes = torch.from_numpy(np.ascontiguousarray(parts.codes)).view(torch.uint8)
    missing = steps * step - codes.shape[1]
    if missing:
        codes = torch.nn.functional.pad(codes, (0, missing))
    packed, planes = _pack(codes, KINDS[kind].bits, depth)
    if KINDS[kind].numbers == "table":
        found["table"] = np.array(parts.table, np.float32)
    if order is not None:
        filled = np.full(steps * step, -1, np.int32)
        filled[: len(order)] = order
        found["order"] = filled
    tensors = {name: torch.from_numpy(array) for name, array in found.items()}
    if planes is not None:
        tensors["planes"] = planes
    dtypes = tuple(tensors[name].dtype for name in ("scales", "lows") if name in tensors)
    form = Form(kind, inputs, steps, depth, group, heads.how, heads.zero, heads.together, dtypes)
    return Codes(form, len(packed), packed, **tensors)


@dataclass(frozen=True, slots=True)
class _Heads:
    """Scales and lows of runs, [outputs, runs] each, as they are to be kept."""

    scales: Array
    lows: Array | None
    how: Lows
    zero: int
    units: Floats | None
    low_units: Floats | None
    repeats: int  # runs of the kernel's for each of these
    together: int  # runs of the kernel's that share a unit

    @classmethod
    def of(cls, parts: Parts, repeats: int) -> _Heads:
        """Keep scales of scales where there are any; zero points where lows are no more."""
        scales, nested = parts.scales, parts.nested
        lows: Array | None = parts.lows
        how: Lows = "" if lows is None else "lows"
        low_units, zero = None, 0
        if lows is not None:
            zeros = _zero_points(scales, lows)
            if zeros is not None:
                first = int(zeros.flat[0])
                if (zeros == first).all():
                    how, zero, lows = ("constant" if first else ""), first, None
                else:
                    how, lows = "zeros", zeros
            elif parts.nested_lows is not None:
                lows, low_units = parts.nested_lows.steps, parts.nested_lows.units
            else:
                nested = None  # plain lows go with plain scales
        if nested is None:
            return cls(scales, lows, how, zero, None, None, repeats, 0)
        together = scales.shape[1] // nested.units.shape[1] * repeats
        return cls(nested.steps, lows, how, zero, nested.units, low_units, repeats, together)

    def laid(self, runs: int) -> dict[str, Array]:
        """Return what there is as [runs, outputs], for as many runs as the kernel looks at."""
        blocks = -(-runs // self.together) if self.together else 0
        every = {
            "scales": (self.scales, self.repeats, runs),
            "lows": (self.lows, self.repeats, runs),
            "units": (self.units, 1, blocks),
            "low_units": (self.low_units, 1, blocks),
        }
        return {
            name: _small(_lay(head, repeats, count))
            for name, (head, repeats, count) in every.items()
            if head is not None
        }


def _in_runs(parts: Parts) -> tuple[Parts, int, NDArray[np.int32] | None]:
    """Return a matrix whose runs are of one size, but for the last, and that size.

    With inputs in another order, which comes third: each run is filled up to the longest, where it
    is -1.
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


def _kind_of(parts: Parts) -> str:
    if parts.table is not None:
        return "e4m3" if len(parts.table) == len(E4M3_NUMBERS) else "t4"
    if parts.codes.dtype == np.int8:
        return "i8"
    largest = int(parts.codes.max(initial=0))
    return next((kind for kind, end in _WHOLE if largest < end), "u8")


def _zero_points(scales: Floats, lows: Floats) -> Array | None:
    """Return whole numbers that are the lows where they are multiplied by the scales.

    Where a scale is zero any number is: the one that another has.
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
    """Return [outputs, runs] as [count, outputs], what is beyond the last run zero."""
    every = np.repeat(head, repeats, axis=1)[:, :count]
    return np.ascontiguousarray(np.pad(every, ((0, 0), (0, count - every.shape[1]))).T)


def _small(head: Array) -> Array:
    """Return numbers as float16 where those are the same; whole ones as they are."""
    if head.dtype.kind != "f":
        return head
    with np.errstate(over="ignore"):
        half = head.astype(np.float16)
    return half if np.array_equal(half.astype(np.float32), head) else head.astype(np.float32)


def _pack(codes: torch.Tensor, bits: int, depth: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return bytes [outputs, steps * depth], and planes where codes have 5 or 6 bits.

    Codes of 2 bits are but planes, and come first.
    """
    if bits == 8:
        return codes, None
    halves = codes.view(len(codes), -1, 2, depth)
    first, second = halves[:, :, 0], halves[:, :, 1]
    if bits == 2:
        return _planes(first, second, bits), None
    packed = ((first & 15) | (second << 4)).view(len(codes), -1)
    return packed, _planes(first >> 4, second >> 4, bits - 4) if bits > 4 else None


def _planes(first: torch.Tensor, second: torch.Tensor, bits: int) -> torch.Tensor:
    """Return planes [outputs, steps * width] of `bits` bits of codes [outputs, steps, depth].

    A byte belongs to places that are a plane's width apart: for each, from the lowest bits up,
    what its first code has, then its second.
    """
    width = first.shape[2] * bits // 4
    planes = torch.zeros((*first.shape[:2], width), dtype=torch.uint8)
    for i in range(first.shape[2] // width):
        places = slice(i * width, (i + 1) * width)
        planes |= (first[..., places] | (second[..., places] << bits)) << (2 * bits * i)
    return planes.view(len(first), -1)
