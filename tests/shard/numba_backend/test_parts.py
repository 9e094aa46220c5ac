"""Kernels that other kernels call: compiled into them, once, and nowhere else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import njit

from tgi_trio.shard.numba_backend.arena import address
from tgi_trio.shard.numba_backend.kernels import kernel
from tgi_trio.shard.numba_backend.kernels.arrays import (
    doubles_at,
    floats_at,
    greater,
    ints_at,
    lesser,
)


@kernel
def leaf(x):  # type: ignore[no-untyped-def]
    return lesser(x, 10) + 1


@kernel
def branch(x):  # type: ignore[no-untyped-def]
    return leaf(x) * 2 if x > 0 else leaf(greater(x, -1))


@njit
def root(x):  # type: ignore[no-untyped-def]
    return branch(x) + leaf(x)


@njit
def choose(a, b):  # type: ignore[no-untyped-def]
    return lesser(a, b), greater(a, b)


@njit
def double_all(where, size):  # type: ignore[no-untyped-def]
    floats, doubles = floats_at(where, size), doubles_at(where + 4 * size, size)
    ints = ints_at(where + 12 * size, size)
    for i in range(size):
        floats[i] *= 2.0
        doubles[i] *= 2.0
        ints[i] *= 2
    return len(floats) + len(doubles) + len(ints)


def test_a_kernel_is_compiled_into_its_callers_and_not_for_itself() -> None:
    assert [root(x) for x in (5, 50, -7)] == [6 * 2 + 6, 11 * 2 + 11, 0 - 6]
    (whole,) = root.overloads.values()
    engine = whole.library.codegen._engine
    assert engine.is_symbol_defined(whole.fndesc.llvm_func_name)
    for part in (leaf, branch):
        (compiled,) = part.overloads.values()
        assert not engine.is_symbol_defined(compiled.fndesc.llvm_func_name)


@pytest.mark.parametrize(
    ("a", "b"), [(3, 4), (-2, -9), (1.5, -0.5), (np.float32(2), 1.0), (7, 2.5)]
)
def test_the_smaller_and_the_larger_of_two_numbers(a: Any, b: Any) -> None:
    assert choose(a, b) == (min(a, b), max(a, b))


def test_arrays_at_an_address() -> None:
    size = 5
    memory = np.zeros(20 * size, np.uint8)
    parts = (
        memory[: 4 * size].view(np.float32),
        memory[4 * size : 12 * size].view(np.float64),
        memory[12 * size :].view(np.int64),
    )
    for part in parts:
        part[:] = np.arange(size)
    assert double_all(address(memory), size) == 3 * size
    for part in parts:
        assert part.tolist() == [0, 2, 4, 6, 8]
