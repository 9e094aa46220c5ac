"""Numbers in compiled kernels, where Python's own would be others: widths, records, truths."""

# mypy: disable-error-code="no-untyped-def, assignment"
from __future__ import annotations

import math
from typing import Any

import numpy as np

from tests.shard.cpu_backend.test_compiler import LIMIT, SIZE, numbers
from tgi_trio.shard.cpu_backend.arena import address
from tgi_trio.shard.cpu_backend.kernels import entry, kernel, linked_calls
from tgi_trio.shard.cpu_backend.kernels.arrays import (
    doubles_at,
    floats_at,
    greater,
    ints_at,
    lesser,
)
from tgi_trio.shard.cpu_backend.machine_code.entry import open_kernel

_RECORD = np.dtype(
    [
        ("count", "i4"), ("scale", "f4"), ("size", "i8"), ("numbers", "i8", (3,)),
        ("mask", "u8"), ("small", "i4"), ("large", "f8"),
    ],
    align=True,
)  # fmt: skip


record_at = linked_calls._record_of(_RECORD, "Return a record.")


@entry
def of_records(at, to):
    record, c = record_at(at), ints_at(to, 64)
    c[0], c[1], c[2] = record.count, record.size, record.small
    c[3] = record.count * 3 - record.small * record.size
    c[4] = np.int64(record.large * record.scale)
    for i in range(3):
        c[5 + i] = record.numbers[i]
        record.numbers[i] = i - 1
    for number in record.numbers:
        c[8] += number * 10 + 1
    c[9] = np.int64(record.mask >> np.uint64(60))
    record.small = -c[0]
    record.large = 0.5
    record.size += record.count


def test_records_of_numpy_are_read_and_written() -> None:
    record, found = np.zeros(1, _RECORD), np.zeros(SIZE, np.int64)
    record[0] = (-5, 1.5, LIMIT, (7, -8, 9), 2**64 - 1, -3, 2.5)
    assert open_kernel(of_records, 2)(address(record), address(found)) == 0
    expected = [-5, LIMIT, -3, -15 - (-3 * LIMIT), 3, 7, -8, 9, 3, 15]
    assert found[:10].tolist() == [(each + 2**63) % 2**64 - 2**63 for each in expected]
    behind: list[Any] = [-5, 1.5, LIMIT - 5, [-1, 0, 1], 2**64 - 1, 5, 0.5]
    assert [each.tolist() for each in record[0]] == behind


@entry
def truths(at, to):
    """Comparisons add up as Python's own do; numpy's would not."""
    a, c = ints_at(at, 3), ints_at(to, 8)
    c[0] = (a[0] > 0) + (a[1] > 0)
    c[1] = (a[0] > 0) * 5 - (a[2] > 0)
    c[2] = ((a[0] > 0) & (a[2] > 0)) + ((a[0] > 0) | (a[2] > 0)) * 2 + ((a[0] > 0) ^ (a[1] > 0))
    c[3] = -(a[0] > 0)
    c[4] = True + True
    c[5] = (a[0] > 0) == 1
    c[6] = 3 if a[0] > 0 and (a[1] > 0) > (a[2] > 0) else 4
    value = True
    if a[2] < 0:
        value = a[2] > 0
    c[7] = value


def test_truth_values_are_numbers() -> None:
    given, found = np.array([1, 2, -3]), np.full(8, 9)
    open_kernel(truths, 2)(address(given), address(found))
    assert found.tolist() == [2, 5, 2, -1, 2, 1, 3, 0]


@entry
def roots(at, to):
    a, c = floats_at(at, 64), doubles_at(to, 64)
    for i in range(64):
        c[i] = math.sqrt(a[i])


def test_roots_have_the_width_of_their_numbers() -> None:
    given, found = np.abs(numbers("f4", 3)), np.zeros(SIZE)
    open_kernel(roots, 2)(address(given), address(found))
    np.testing.assert_array_equal(found, np.sqrt(given).astype(np.float64))


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
