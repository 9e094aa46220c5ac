"""Prints what kernels of single operations find, by Triton's interpreter.

    TRITON_INTERPRET=1 python -m tests.testing.quick_results [hurry]

Each kernel runs twice, with other numbers: what types lead to is remembered of the first.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import warnings
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

TYPES = ("bool", "int8", "int16", "int32", "int64", "uint8", "float16", "bfloat16", "float32")
PAIRS = (
    *("add", "sub", "mul", "div", "lt", "le", "gt", "ge", "eq", "ne", "and", "or", "xor"),
    *("floor", "mod", "left", "right", "minimum", "maximum"),
)
MIXED = (
    *(("int32", "int64"), ("int64", "int32"), ("int32", "float32"), ("bool", "int32")),
    *(("float16", "float32"), ("bfloat16", "float32"), ("uint8", "int8"), ("int16", "int64")),
)
NUMBERS = (0, 1, -3, 300, 1 << 20, 1 << 31, 1 << 40, 0.0, -0.0, 1.5, -1e-40, 1e39)
FRACTIONS = (*NUMBERS, float("inf"), float("-inf"), float("nan"))
CASTS = {
    "int1": tl.int1,
    "int8": tl.int8,
    "int64": tl.int64,
    "fp16": tl.float16,
    "fp32": tl.float32,
}
# Numbers of any size, defaults, names, options that are not the kernel's; and what cannot be.
LAUNCHES: tuple[tuple[Any, ...], ...] = (
    *((2,), (2.5,), (True,), (1 << 40,), (-(1 << 31),), ((1 << 31),), (2, 4), (2, 4, "one")),
    *((2, {"more": 7}), ({"factor": 2, "KIND": "one", "num_warps": 4},), (2, {"grid": (2, 3)})),
    (2, {"grid": lambda told: (4, 1) if told["KIND"] == "two" else (1,)}),
    *((2, {"grid": (0,)}), (), (2, 3, "two", 4), (2, {"factor": 2}), (2, {"grid": (1, 1, 1, 1)})),
    (torch.ones(1),),  # an address is no factor
)


@triton.jit
def compute(a, b, PAIR: tl.constexpr):
    if PAIR == "add":
        return a + b
    elif PAIR == "sub":
        return a - b
    elif PAIR == "mul":
        return a * b
    elif PAIR == "div":
        return a / b
    elif PAIR == "lt":
        return a < b
    elif PAIR == "le":
        return a <= b
    elif PAIR == "gt":
        return a > b
    elif PAIR == "ge":
        return a >= b
    elif PAIR == "eq":
        return a == b
    elif PAIR == "ne":
        return a != b
    elif PAIR == "and":
        return a & b
    elif PAIR == "or":
        return a | b
    elif PAIR == "floor":
        return a // b
    elif PAIR == "mod":
        return a % b
    elif PAIR == "left":
        return a << b
    elif PAIR == "right":
        return a >> b
    elif PAIR == "minimum":
        return tl.minimum(a, b)
    elif PAIR == "maximum":
        return tl.maximum(a, b)
    else:
        return a ^ b


@triton.jit
def pair(x, y, found, PAIR: tl.constexpr):
    rows, columns = tl.arange(0, 4), tl.arange(0, 8)
    a = tl.load(x + rows)
    result = compute(a[:, None], tl.load(y + columns)[None, :], PAIR)
    tl.store(found + rows[:, None] * 8 + columns[None, :], result.to(tl.float64))
    scalar = compute(tl.load(x + 1), tl.load(y + 2), PAIR)
    tl.store(found + 32, scalar.to(tl.float64))


@triton.jit
def number(x, found, NUMBER: tl.constexpr, PAIR: tl.constexpr):
    rows = tl.arange(0, 4)
    a = tl.load(x + rows)
    tl.store(found + rows, compute(a, NUMBER, PAIR).to(tl.float64))
    tl.store(found + 4 + rows, compute(NUMBER, a, PAIR).to(tl.float64))


@triton.jit
def choose(x, found, NUMBER: tl.constexpr, COUNT):
    rows = tl.arange(0, 4)
    a = tl.load(x + rows, mask=rows < COUNT, other=NUMBER)
    tl.store(found + rows, a.to(tl.float64))
    tl.store(found + 4 + rows, tl.where(rows % 2 == 0, a, NUMBER).to(tl.float64))
    tl.store(found + 8 + rows, tl.where(rows < COUNT, NUMBER, a).to(tl.float64), mask=rows > 0)


@triton.jit
def convert(x, found, DTYPE: tl.constexpr):
    rows = tl.arange(0, 4)
    a = tl.load(x + rows).to(DTYPE)
    tl.store(found + rows, a.to(tl.float64))
    tl.store(found + 4 + rows, (a[:, None] + tl.full([4, 1], 1, DTYPE)).to(tl.float64)[:, 0])


@triton.jit
def write(x, found, DTYPE: tl.constexpr, WAY: tl.constexpr):
    """Of several shapes, converted or not, with a mask or without."""
    rows, columns = tl.arange(0, 4), tl.arange(0, 2)
    a, one = tl.load(x + rows), tl.load(x + 1)
    places = found.to(tl.pointer_type(DTYPE)) + rows[:, None] * 2 + columns[None, :]
    if WAY == "whole":
        tl.store(places, (a[:, None] + columns[None, :]).to(DTYPE))
    elif WAY == "repeated":
        tl.store(places, a[:, None].to(DTYPE), mask=columns[None, :] < 1)
    elif WAY == "one":
        tl.store(places, one.to(DTYPE), mask=(rows[:, None] > 0) & (columns[None, :] > 0))
    elif WAY == "single":
        tl.store(found.to(tl.pointer_type(DTYPE)) + 3, one.to(DTYPE), mask=one == one)
    elif WAY == "converted":
        tl.store(places, a[:, None] + columns[None, :])
    elif WAY == "number":
        tl.store(places, 7, mask=rows[:, None] > 1)
    elif WAY == "lower":
        tl.store(places, a.to(DTYPE))
    else:
        tl.store(found.to(tl.pointer_type(DTYPE)), a.to(DTYPE))


@triton.jit
def turn(x, found):
    rows, columns = tl.arange(0, 2), tl.arange(0, 4)
    a = -tl.load(x + rows[:, None] * 4 + columns[None, :])
    tl.store(found + columns[:, None] * 2 + rows[None, :], tl.trans(a).to(tl.float64))
    tl.store(found + 8 + rows, -tl.load(x + rows).to(tl.float64))


@triton.jit
def reduce(x, found, NAME: tl.constexpr, AXIS: tl.constexpr, KEEP: tl.constexpr):
    rows, columns = tl.arange(0, 2)[:, None], tl.arange(0, 4)[None, :]
    a = tl.load(x + rows * 4 + columns)
    if NAME == "sum":
        several, one = tl.sum(a, AXIS, keep_dims=KEEP), tl.sum(tl.load(x + tl.arange(0, 8)), 0)
    elif NAME == "max":
        several, one = tl.max(a, AXIS, keep_dims=KEEP), tl.max(tl.load(x + tl.arange(0, 8)), 0)
    else:
        several, one = tl.min(a, AXIS, keep_dims=KEEP), tl.min(tl.load(x + tl.arange(0, 8)), 0)
    if KEEP:
        tl.store(found + rows + columns, (several + tl.zeros([2, 4], several.dtype)).to(tl.float64))
    else:
        tl.store(found + tl.arange(0, several.numel), several.to(tl.float64))
    tl.store(found + 10, one.to(tl.float64))


@triton.jit
def launched(x, found, factor, more=3, KIND: tl.constexpr = "two"):
    place = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    a = tl.load(x + place).to(tl.float64)
    if KIND == "two":
        a = a * factor
    tl.store(found + place, a + more)


def draw(dtype: str, count: int, seed: int) -> torch.Tensor:
    """Return numbers among which are the least, the largest, and both zeros."""
    source = torch.Generator().manual_seed(seed)
    kind = getattr(torch, dtype)
    if kind.is_floating_point:
        drawn = torch.randn(count, generator=source).to(kind)
        drawn[seed % count] = (0.0, -0.0, float("inf"))[seed % 3]
        return drawn
    if kind is torch.bool:
        return torch.randint(0, 2, (count,), generator=source).bool()
    facts = torch.iinfo(kind)
    drawn = torch.randint(-5, 6, (count,), generator=source).to(kind)
    drawn[seed % count] = (facts.min, facts.max, 0)[seed % 3]
    return drawn


def run(kernel: Any, operands: list[torch.Tensor], *rest: Any) -> str:
    found = torch.zeros(40, dtype=torch.float64)
    named = rest[-1] if rest and isinstance(rest[-1], dict) else {}
    grid = named.get("grid", (1,))
    try:
        kernel[grid](
            *operands,
            found,
            *(each for each in rest if each is not named),
            **{name: value for name, value in named.items() if name != "grid"},
        )
    except Exception as error:  # the same ones are expected
        return type(error).__name__
    return hashlib.sha256(found.numpy().tobytes()).hexdigest()[:16]


def main() -> None:
    if "hurry" in sys.argv[1:]:
        from tgi_trio.testing.quick_interpreter import hurry

        hurry()
    results: dict[str, list[str]] = {}
    cases: list[tuple[str, Any, list[str], tuple[Any, ...]]] = []
    for one, other in (*zip(TYPES, TYPES, strict=True), *MIXED):
        cases += [(f"{one} {name} {other}", pair, [one, other], (name,)) for name in PAIRS]
    for one in ("int32", "int64", "float32", "float16", "int8"):
        values = FRACTIONS if one.startswith("float") else NUMBERS[:7]
        drawn = itertools.product(PAIRS, values)
        cases += [
            (f"{one} {name} {value!r}", number, [one], (value, name))
            for name, value in itertools.islice(drawn, 0, None, 1 if one == "float32" else 4)
        ]
        cases += [(f"{one} choose {value!r}", choose, [one], (value, 3)) for value in values]
    cases += [
        (f"{one} to {name}", convert, [one], (dtype,))
        for one in TYPES
        for name, dtype in CASTS.items()
    ]
    ways = ("whole", "repeated", "one", "single", "converted", "number", "lower", "refused")
    cases += [
        (f"{one} written {way} as {name}", write, [one], (dtype, way))
        for one in ("bool", "int32", "float16", "bfloat16", "float32")
        for name, dtype in CASTS.items()
        for way in ways
    ]
    cases += [(f"{one} turned", turn, [one], ()) for one in TYPES]
    cases += [
        (f"{one} {name} over {axis}, {keep}", reduce, [one], (name, axis, keep))
        for one in TYPES
        for name, axis, keep in itertools.product(("sum", "max", "min"), (0, 1), (True, False))
    ]
    cases += [(f"launch {i}", launched, ["float32"], rest) for i, rest in enumerate(LAUNCHES)]
    warnings.simplefilter("ignore")
    with np.errstate(all="ignore"):
        for name, kernel, dtypes, rest in cases:
            results[name] = [
                run(kernel, [draw(d, 8, 7 * seed + i) for i, d in enumerate(dtypes)], *rest)
                for seed in range(2)
            ]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
