"""What EXL3's matrices ask for before and after their products: turns by Hadamard's matrix of 128.

    result = output scales * H (numbers (H (input scales * activations))) / 128

The 128 is in the numbers' scales. All is float32, and a row's numbers are added in the same order
whatever other rows there are.
"""

from __future__ import annotations

from typing import Any, Final

import llvmlite.ir as ir
import numpy as np

from tgi_trio.model.quantised.exl3_layout import TURNED
from tgi_trio.shard.checkpoint.formats.exl3 import RING
from tgi_trio.shard.cpu_backend.kernels import entry
from tgi_trio.shard.cpu_backend.kernels.compiler import types
from tgi_trio.shard.cpu_backend.kernels.emit import FLOATS, INTS, address, load_as, operation
from tgi_trio.shard.cpu_backend.kernels.emit import store_as as write
from tgi_trio.shard.cpu_backend.kernels.linear import finish
from tgi_trio.shard.cpu_backend.kernels.linked_calls import operation_at, step_at
from tgi_trio.shard.cpu_backend.kernels.quantised.codes import offset
from tgi_trio.shard.cpu_backend.kernels.vectors import fma_of, load, store
from tgi_trio.shard.cpu_backend.tables import Buffer, Code, Epilogue
from tgi_trio.shard.cpu_backend.weight_layout import LANES, PANEL

TURN_IN, GATE = int(Code.TURN_IN), int(Epilogue.GATE)
FLOATS_AT, GATES = int(Buffer.FLOATS), int(Buffer.GATES)
_BYTES: Final = 4 * LANES  # of a vector
_VECTORS: Final = TURNED // LANES


@entry
def run_turns(variant, rank, step_address, op_address, counter, scratch):
    """Run one thread's part of an operation; every thread has its own runs of 128 features."""
    step, op = step_at(step_address), operation_at(op_address)
    rows = step.wanted if op.wanted_only else step.tokens
    width = op.inputs if op.code == TURN_IN else op.outputs
    each = width // TURNED
    runs = rows * each
    source = step.buffers[op.source]
    for run in range(runs * rank // step.threads, runs * (rank + 1) // step.threads):
        row, begin = run // each, run % each * TURNED
        place = source + (row * width + begin) * 4
        if op.code == TURN_IN:
            target = step.buffers[FLOATS_AT] + (row * width + begin) * 4
            turn_scaled(place, op.scales + begin * 4, target)
            continue
        turn_in_place(place)
        if op.epilogue != GATE:
            for i in range(0, TURNED, PANEL):
                panel = (begin + i) // PANEL
                finish(variant, step, op, panel, row, 1, place + 4 * i, np.int64(0))
            continue
        gates = step.buffers[GATES] + (row * width + begin) * 4
        for i in range(0, TURNED, LANES):  # as in a panel of both
            store(scratch, load(gates + 4 * i))
            store(scratch + 4 * LANES, load(place + 4 * i))
            finish(variant, step, op, (begin + i) // LANES, row, 1, scratch, np.int64(0))


@operation(types.none, address, address, address)
def turn_scaled(builder: Any, source: Any, scales: Any, target: Any) -> Any:
    """Multiply 128 numbers by their scales and turn them, in the order of a ring's inputs."""
    values = [
        builder.fmul(*(load_as(builder, offset(builder, at, i * _BYTES), FLOATS) for at in both))
        for i, both in enumerate([(source, scales)] * _VECTORS)
    ]
    ring = ir.Constant(INTS, list(RING))
    ordered = [builder.shuffle_vector(each, each, ring) for each in _turn(builder, values)]
    return _write_all(builder, ordered, target)


@operation(types.none, address)
def turn_in_place(builder: Any, where: Any) -> Any:
    """Turn 128 numbers."""
    values = [load_as(builder, offset(builder, where, i * _BYTES), FLOATS) for i in range(_VECTORS)]
    return _write_all(builder, _turn(builder, values), where)


def _write_all(builder: Any, values: list[Any], where: Any) -> Any:
    for i, value in enumerate(values):
        result = write(builder, value, offset(builder, where, i * _BYTES))
    return result


def _turn(builder: Any, values: list[Any]) -> list[Any]:
    """Return Hadamard's matrix, as Sylvester builds it, times the numbers of eight vectors."""
    span = 1
    while span < LANES:
        other = ir.Constant(INTS, [lane ^ span for lane in range(LANES)])
        signs = ir.Constant(FLOATS, [-1.0 if lane & span else 1.0 for lane in range(LANES)])
        values = [
            fma_of(builder, each, signs, builder.shuffle_vector(each, each, other))
            for each in values
        ]
        span *= 2
    span = 1
    while span < _VECTORS:
        pairs = [(values[i & ~span], values[i | span], i & span) for i in range(_VECTORS)]
        values = [
            builder.fsub(low, high) if odd else builder.fadd(low, high) for low, high, odd in pairs
        ]
        span *= 2
    return values
