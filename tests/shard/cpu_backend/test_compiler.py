"""Kernels against Python itself, which runs the same functions on arrays in place of addresses."""

# mypy: disable-error-code="no-untyped-def, assignment"
from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import numpy as np
import pytest

from tgi_trio.shard.cpu_backend.arena import address
from tgi_trio.shard.cpu_backend.kernels import entry, kernel
from tgi_trio.shard.cpu_backend.kernels.arrays import (
    doubles_at,
    floats_at,
    greater,
    ints_at,
    lesser,
    words_at,
)
from tgi_trio.shard.cpu_backend.kernels.compiler.types import Kernel
from tgi_trio.shard.cpu_backend.machine_code.entry import open_kernel

Array = np.ndarray[Any, Any]
SIZE = 64  # elements of every array
LIMIT = 1 << 62
_TABLE = (3, 5)
_SCALE = np.float32(1.5)


def _view(array: Any, size: int) -> Any:
    return array[:size]


_PYTHON: dict[str, Any] = dict.fromkeys(("ints_at", "floats_at", "doubles_at", "words_at"), _view)
_PYTHON |= {"lesser": min, "greater": max}


def in_python(function: Kernel, more: Mapping[str, Any] = {}) -> Callable[..., Any]:
    """Return the function as Python runs it, with all that it calls.

    `more`: what else it knows by name, in place of the operations that only a compiler has.
    """
    known = {**function.function.__globals__, **more}
    changed: dict[str, Any] = {**known, **_PYTHON}
    for name, found in known.items():
        if isinstance(found, Kernel):
            changed[name] = FunctionType(found.function.__code__, changed, name)
    made: Callable[..., Any] = changed[function.name]
    return made


def numbers(kind: str, seed: int) -> Array:
    """Return edge cases and random numbers."""
    rng = np.random.default_rng(seed)
    if kind == "i8":
        edges = [0, 1, -1, 2, -2, 3, -7, 8, 63, -64, LIMIT, -LIMIT]
        return np.concatenate([edges, rng.integers(-100, 100, SIZE - len(edges))])
    if kind == "u8":
        return rng.integers(0, 2**64, SIZE, np.uint64)
    values = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 0.1]
    return np.concatenate([values, rng.normal(0, 3, SIZE - len(values))]).astype(kind)


@entry
def whole_numbers(at, other, to):
    a, b, c = ints_at(at, 64), ints_at(other, 64), ints_at(to, 64)
    for i in range(64):
        c[i] = (a[i] + b[i]) * 3 - (a[i] & b[i]) + (a[i] | 12) ^ b[i]
        if i % 2:
            c[i] = (~a[i] << 3) + (b[i] >> 2) - (-a[i])
        elif i % 3:
            c[i] = (a[i] // 8) + (a[i] % 16) + a[i] // -5 + a[i] % -7 + abs(b[i])


@entry
def quotients(at, other, to):
    a, b, c = ints_at(at, 64), ints_at(other, 64), ints_at(to, 64)
    for i in range(64):
        c[i] = a[i] // b[i]
        c[63 - i] += a[i] % b[63 - i]


@entry
def unsigned_numbers(at, other, to):
    a, b, c = words_at(at, 64), words_at(other, 64), words_at(to, 64)
    for i in range(64):
        c[i] = (a[i] * b[i] >> np.uint64(7)) + a[i] // (b[i] | np.uint64(1)) ^ a[i] % np.uint64(9)


@entry
def mixed_numbers(at, other, to):
    a, b, c = floats_at(at, 64), ints_at(other, 64), doubles_at(to, 64)
    for i in range(64):
        c[i] = a[i] * b[i] + a[i] / 4.0 - b[i] / 8
        if i % 4 == 0:
            c[i] = np.float64(a[i] * _SCALE + a[i])
        if i % 4 == 1:
            c[i] = math.sqrt(np.float64(abs(a[i]))) - 2.0**-3
        if i % 4 == 2 and np.isfinite(a[i]):
            c[i] = np.int64(a[i] * 100) + np.float32(b[i])


@entry
def comparisons(at, other, to):
    a, b, c = floats_at(at, 64), doubles_at(other, 64), ints_at(to, 64)
    for i in range(64):
        for j in range(64):
            found = 0
            if a[i] < b[j] or a[i] == 1:
                found += 1
            if a[i] != b[j] and not a[i] >= b[j]:
                found += 2
            if a[i] <= b[j] or np.isnan(b[j]) or b[j] > 2.0:
                found += 4
            c[i] += found * (j + 1)


@kernel
def halved(values, place):
    """Return whether a number is positive, and change it."""
    values[place] //= 2
    return values[place] > 0


@kernel
def bounds(values, size):
    least, most = values[0], values[0]
    for value in values:
        least = value if value < least else least
        most = most if value < most else value
    if size == 0:
        return np.int64(0), np.int64(0)
    return least, most


@entry
def evaluation_order(at, other, to):
    a, b, c = ints_at(at, 64), ints_at(other, 64), ints_at(to, 64)
    for i in range(62):
        if halved(a, i) and halved(b, i):
            c[i] = 1
        elif halved(a, i + 1) or halved(b, i + 1) or halved(b, i + 2):
            c[i] = 2
        c[i] += 10 * (halved(b, i) and not halved(a, i))
    c[62], c[63] = bounds(a, 64)
    c[63], c[62] = c[62], c[63]


@entry
def control(at, other, to):
    a, b, c = ints_at(at, 64), ints_at(other, 64), ints_at(to, 64)
    c[:] = -1
    last = 0
    for last in range(60, 3, -4):
        if a[last] % 5 == 0:
            continue
        for step in range(1, 4):
            for i in range(last, 64, step):
                c[i] += step
                if b[i] > 50:
                    break
            for i in range(last, 0, -step):
                c[i] ^= i
    c[last] = 1000
    i = 0
    while True:
        i += 1
        if i > 60 or a[i] == b[i]:
            break
        if a[i] > 0:
            continue
        c[i] -= 1
    pair = a[1], b[1]
    first = second = pair[i % 2] + _TABLE[1]
    while first:
        first //= 2
        if first < 0:
            return
        second += 1
    c[0] = second


@entry
def names_used_again(at, other, to):
    a, b, c = floats_at(at, 64), ints_at(other, 64), doubles_at(to, 64)
    for i in range(0, 62):
        for value in range(i, i + 2):
            c[i] += value
        value = a[i] * _SCALE
        c[i] += value
        value = value, b[i]
        if b[i] > 0:
            value = np.float64(value[0]) / 8.0
            c[i] -= value
        else:
            c[i] += value[1]
            value = i
            c[i] -= value
        value = 2
        while value < 50:
            value *= 3
        c[i] *= value
        if i == 50:
            value = 0.5
            c[63] = value
            break


@kernel
def noted(log, number):
    """Write a number down, and return it; `log` begins with how many there are."""
    log[0] += 1
    log[log[0]] = number
    return number


@kernel
def difference(a, b):
    return a - b


@kernel
def replaced(values, place, number):
    values[place] = number
    return np.int64(1)


@entry
def operands(at, other, to):
    """All of them are evaluated once, from left to right, and values before their targets."""
    a, b, log = ints_at(at, 64), ints_at(other, 64), ints_at(to, 64)
    a[0] = noted(log, 1) - noted(log, 2)
    if noted(log, 3) < noted(log, 4):
        a[1] = difference(noted(log, 5), noted(log, 6))
    b[noted(log, 7)] = noted(log, 8)
    b[noted(log, 9)] += noted(log, 10)
    pair = noted(log, 11), noted(log, 12)
    a[2] = pair[0] - pair[1]
    b[3] += replaced(b, 3, 1000)
    log[noted(log, 13)], log[noted(log, 14)] = noted(log, 15), noted(log, 16)
    for i in range(noted(log, 17), noted(log, 20), noted(log, 2)):
        noted(log, i)
    log[40] = noted(log, 1) if noted(log, 0) else noted(log, 2)


@entry
def unsigned_order(at, other, to):
    a, b, c = words_at(at, 64), words_at(other, 64), doubles_at(to, 64)
    for i in range(64):
        half, third = np.uint64(1 << 63), np.uint64(3)
        if a[i] < b[i]:
            c[i] += 1
        if a[i] >= half or a[i] == third:
            c[i] += 2
        if lesser(a[i], b[i]) == a[i]:
            c[i] += 4
        if greater(a[i], half) == half:
            c[i] += 8
        c[i] += np.float64(a[i] // np.uint64(16)) / 4096.0
        c[i] -= np.float64(np.uint64(np.float64(a[i] | half))) / 65536.0


@kernel
def not_negative(number):
    if number < 0:
        number = 0
    return number


_TENTH = np.float32(0.1)


@entry
def edges(at, other, to):
    a, b, c = floats_at(at, 64), doubles_at(other, 64), doubles_at(to, 64)
    c[:] = -1.5
    c[60], c[61], c[62] = -a[0], -a[1], abs(b[2]) * -0.0
    for i in range(60):
        c[i] = np.float64(-a[i])
        if i % 5 == 2:
            c[i] = np.float64(_TENTH * _TENTH) + np.float64(np.float32(0.1))
        if i % 5 == 3:
            c[i] = np.float64(a[i] > b[i]) + (7 / 2)
        if i % 5 == 4:
            c[i] = not_negative(i - 30) // 2
        if not np.isfinite(a[i]):
            c[i] = 1000
        if b[i]:
            c[i] += 2000
        while c[i] > 2500 and c[i] < 9000:
            c[i] -= 700
        three = 5.0, b[i], 0.25
        c[i] += three[i % 3]
    a[:] = 2.0


KINDS = {
    whole_numbers: "i8 i8 i8",
    quotients: "i8 i8 i8",
    unsigned_numbers: "u8 u8 u8",
    mixed_numbers: "f4 i8 f8",
    comparisons: "f4 f8 i8",
    evaluation_order: "i8 i8 i8",
    control: "i8 i8 i8",
    names_used_again: "f4 i8 f8",
    operands: "i8 i8 i8",
    unsigned_order: "u8 u8 f8",
    edges: "f4 f8 f8",
}


@pytest.mark.parametrize("function", KINDS, ids=lambda function: function.name)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of overflows and zero divisors
def test_it_computes_what_python_computes(function: Kernel) -> None:
    kinds, run = KINDS[function].split(), open_kernel(function, 3)
    for seed in range(4):
        given = [numbers(kind, 10 * seed + i) for i, kind in enumerate(kinds[:2])]
        result = np.zeros(SIZE, kinds[2])
        ours, theirs = [*map(np.copy, given), result], [*map(np.copy, given), result.copy()]
        assert run(*map(address, ours)) == 0
        in_python(function)(*theirs)
        for own, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(own, other)
            signs = (np.signbit(each[own == own].astype(np.float64)) for each in (own, other))
            np.testing.assert_array_equal(*signs)  # of zeros, too
