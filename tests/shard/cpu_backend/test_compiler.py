"""Kernels against Python itself, which runs the same functions on arrays in place of addresses."""

# mypy: disable-error-code="no-untyped-def, assignment"
from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
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
from tgi_trio.shard.cpu_backend.kernels.compiler.program import Program
from tgi_trio.shard.cpu_backend.kernels.compiler.types import Kernel
from tgi_trio.shard.cpu_backend.kernels.compiler.values import KernelError
from tgi_trio.shard.cpu_backend.machine_code.entry import open_kernel

Array = np.ndarray[Any, Any]
SIZE = 64  # elements of every array
LIMIT = 1 << 62
_TABLE = (3, 5)
_SCALE = np.float32(1.5)


def _view(array: Any, size: int) -> Any:
    return array[:size]


_PYTHON = dict.fromkeys(("ints_at", "floats_at", "doubles_at", "words_at"), _view)


def in_python(function: Kernel) -> Callable[..., Any]:
    """Return the function as Python runs it, with all that it calls."""
    known = function.function.__globals__
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


KINDS = {
    whole_numbers: "i8 i8 i8",
    quotients: "i8 i8 i8",
    unsigned_numbers: "u8 u8 u8",
    mixed_numbers: "f4 i8 f8",
    comparisons: "f4 f8 i8",
    evaluation_order: "i8 i8 i8",
    control: "i8 i8 i8",
    names_used_again: "f4 i8 f8",
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


@kernel
def of_any(value):
    return value + value


@entry
def several_types(to):
    """A function is compiled for each type that it is called with."""
    results = doubles_at(to, 3)
    results[0], results[1] = of_any(2), of_any(np.float32(0.1))
    results[2] = of_any(0.1)


@entry
def smaller_and_larger(at, other, to):
    a, b, c = floats_at(at, 64), ints_at(other, 64), doubles_at(to, 64)
    for i in range(0, 64, 4):
        c[i], c[i + 1] = lesser(a[i], b[i]), greater(a[i], b[i])
        c[i + 2], c[i + 3] = lesser(b[i], 10), greater(a[i], a[i + 1])


def test_the_smaller_and_the_larger_of_two_numbers() -> None:
    given, others, found = numbers("f4", 1)[8:], numbers("i8", 2)[8:], np.zeros(SIZE)
    given, others = np.resize(given, SIZE), np.resize(others, SIZE)
    open_kernel(smaller_and_larger, 3)(address(given), address(others), address(found))
    for i in range(0, SIZE, 4):
        a, b = float(given[i]), int(others[i])
        expected = [min(a, b), max(a, b), min(b, 10), max(a, float(given[i + 1]))]
        assert found[i : i + 4].tolist() == expected


def test_a_function_has_as_many_forms_as_types() -> None:
    results = np.zeros(3)
    open_kernel(several_types, 1)(address(results))
    assert results.tolist() == [4, float(np.float32(0.1) + np.float32(0.1)), 0.2]


WRONG = {
    "x = 1\n    if at:\n        x = 0.5\n    return x": "x has one type or another here",
    "x = 1\n    for i in range(at):\n        x += 0.5": "x has another type when the loop begins",
    "x = 1\n    while x:\n        x = 0.5": "x has another type when the loop begins",
    "for i in range(at):\n        x = 1\n        x = 0.5\n    x += 1": "x has one type or another",
    "if at:\n        return 1\n    return 0.5": "it returns float64, int64",
    "if at:\n        return 1": "it returns int64, none",
    "return missing": "missing has no value",
    "return [at]": "kernels have no List",
    "assert at": "kernels have no Assert",
    "return print(at)": "print cannot be called in a kernel",
    "return abs(x=at)": "arguments have no names in calls",
    "return ints_at(at, 2)[-1]": "arrays are not counted from their end",
    "return ints_at(at)": "ints_at takes 2 arguments|missing 1 required",
    "return at.bytes": "int64 has no bytes",
    "return at[0]": "int64 has no elements",
    "a, b = at, at, at": "3 values for 2 names",
    "a, b = at": "int64 cannot be unpacked",
    "return 1 < at < 3": "compare two values at a time",
    "return at + words_at(at, 1)[0]": "signed and unsigned numbers need a conversion",
    "return at ** 2": "Pow of int64",
    "for i in range(at):\n        pass\n    else:\n        pass": "loops have no else",
    "value = pass_by(at)": "value would have no value",
    "return ints_at": "no number",
    "ints_at(at, 3)[1:] = 0": "a slice is a whole array",
    "return ~0.5": "~ of float64",
    "return wrong(at)": "wrong calls itself",
}


@pytest.mark.parametrize("body", WRONG)
def test_what_kernels_must_not_contain_is_an_error_that_names_the_line(
    body: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"def pass_by(at):\n    pass\n\ndef wrong(at):\n    {body}\n"
    file = tmp_path / "wrong.py"
    file.write_text(text)
    module = ModuleType("wrong_kernels")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "wrong_kernels", module)
    module.__dict__.update(ints_at=ints_at, words_at=words_at)
    exec(compile(text, file, "exec"), module.__dict__)
    for name in ("pass_by", "wrong"):
        module.__dict__[name] = Kernel(module.__dict__[name])
    with pytest.raises((KernelError, TypeError), match=WRONG[body]) as caught:
        Program().add_entry(module.__dict__["wrong"], (), 1, "run")
    if isinstance(caught.value, KernelError):
        assert "(wrong_kernels, line " in str(caught.value)
        assert str(caught.value).endswith("in wrong)")


def test_arguments_are_counted() -> None:
    with pytest.raises(KernelError, match="control takes 3 arguments"):
        Program().add_entry(control, (), 2, "run")
