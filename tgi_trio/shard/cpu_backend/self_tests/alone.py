"""One operation of the kernels, run by a self-test."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.cpu_backend.arena import address, allocate_zeroed
from tgi_trio.shard.cpu_backend.machine_code.object_files import MachineCode
from tgi_trio.shard.cpu_backend.tables import OPERATION, STEP, Buffer, Code

_ERROR = 1e-4

Fields = Mapping[str, Any]  # numbers, or arrays in place of their addresses


def run_alone(
    kernel: MachineCode,
    code: Code,
    buffers: Mapping[Buffer, NDArray[Any]],
    operation: Fields,
    step: Fields,
    *,
    room: int = 4096,
) -> None:
    """Run an operation on two threads, one after the other.

    `buffers`: what it reads, and overwrites. `operation`, `step`: fields of these records; `room`:
    bytes of scratch memory.
    """
    own, facts = np.zeros((1,), OPERATION), np.zeros((1,), STEP)
    for record, fields in ((own, {"code": code, **operation}), (facts, {"threads": 2, **step})):
        for name, value in fields.items():
            record[name] = address(value) if isinstance(value, np.ndarray) else value
    for buffer, rows in buffers.items():
        facts["buffers"][0, buffer] = address(rows)
    scratch, counter = allocate_zeroed((room,)), np.zeros(1, np.int64)
    for rank in range(2):
        kernel(rank, address(facts), address(own), address(counter), address(scratch))


def find_difference(
    code: Code,
    buffers: Mapping[Buffer, NDArray[Any]],
    expected: Iterable[tuple[Buffer, NDArray[Any]]],
) -> str | None:
    """Return which operation left something else in buffers than is expected, or None."""
    for buffer, rows in expected:
        error = float(np.abs(buffers[buffer] - rows).max())
        if not error < _ERROR:  # as NaN is not
            return f"{code.name} is {error:.2g} away from the reference"
    return None
