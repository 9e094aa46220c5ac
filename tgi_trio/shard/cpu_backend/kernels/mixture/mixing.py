"""Linear layers of experts (grouped GEMM): only experts with rows are read, each once.

Rows are sorted by expert (`routing.arrange`), so an expert's rows are a matrix product like any
other. Threads share panels. In the first layer any panel of any expert is a work item. In the
second, whose results are added to the rows of tokens, an item is a panel of all experts. So no
other thread adds to the same features meanwhile, and a token's experts are added in the order of
their numbers, whatever else is in the step.
"""

from __future__ import annotations

import numpy as np

from tgi_trio.shard.cpu_backend.kernels import entry, kernel
from tgi_trio.shard.cpu_backend.kernels.activation import activate, cut, sigmoid_times
from tgi_trio.shard.cpu_backend.kernels.adapters import call_adapter_kernel, find_runs
from tgi_trio.shard.cpu_backend.kernels.arrays import ints_at
from tgi_trio.shard.cpu_backend.kernels.linear import (
    bytes_ahead,
    count_rows_at_once,
    multiply_quantised,
    multiply_rows,
    row_and_panel_bytes,
)
from tgi_trio.shard.cpu_backend.kernels.linked_calls import mixture_at, operation_at, step_at
from tgi_trio.shard.cpu_backend.kernels.matrix_unit import prepare_registers, release_registers
from tgi_trio.shard.cpu_backend.kernels.mixture.routing import arrange, route
from tgi_trio.shard.cpu_backend.kernels.quantised.activations import store_result
from tgi_trio.shard.cpu_backend.kernels.threads import atomic_add
from tgi_trio.shard.cpu_backend.kernels.vectors import (
    add,
    every_other,
    fill,
    fma,
    load,
    load_float,
    load_int,
    minimum,
    multiply,
    store,
)
from tgi_trio.shard.cpu_backend.scratch_memory import ROWS
from tgi_trio.shard.cpu_backend.tables import Buffer, Code, Epilogue
from tgi_trio.shard.cpu_backend.weight_layout import LANES, PANEL

EXPERT = 3  # int64s of an expert in `op.weights`: addresses of panels, scales and bias; 0: none
_STEP_BYTES = 4 * PANEL  # bytes of one step of a panel
_SHARED = 8  # one work item in this many is assigned to the first free thread
ROUTE, ARRANGE, JOIN = int(Code.ROUTE), int(Code.ARRANGE), int(Code.JOIN)
GATE, ACTIVATE = int(Epilogue.GATE), int(Epilogue.ACTIVATE)
ADD = int(Epilogue.ADD)
GROUPS, MEMBERS, PARTS, OPENED, LOW = (
    int(b) for b in (Buffer.GROUPS, Buffer.MEMBERS, Buffer.PARTS, Buffer.OPENED, Buffer.LOW)
)


@entry
def mix_experts(variant, rank, step_address, op_address, counter, scratch):
    """Run one thread's part of an operation of a mixture."""
    step, op = step_at(step_address), operation_at(op_address)
    mixture = mixture_at(op.facts)
    if op.code == ROUTE:
        route(rank, step, op, mixture, scratch)
    elif op.code == ARRANGE:
        arrange(variant, rank, step, op, mixture, scratch)
    elif op.code == JOIN:
        join(rank, step, op)
    else:
        multiply_experts(variant, rank, step, op, mixture, counter, scratch)


@kernel
def multiply_experts(variant, rank, step, op, mixture, counter, sums):
    """Compute this thread's share of a linear layer of all experts that have rows.

    `counter`: address of the number of shared work items taken. `sums`: as for `linear.linear`.
    """
    groups = step.buffers[GROUPS]
    used, panels = load_int(groups), op.outputs // PANEL
    pieces, experts = panels * used, np.int64(1)
    if op.epilogue == ADD:
        pieces, experts = panels, used
    begin, end = pieces * rank // step.threads, pieces * (rank + 1) // step.threads
    shared = np.int64(0)  # items at the end of every share that any thread may take
    if step.threads > 1:
        shared = pieces // step.threads
        if step.tokens * mixture.per_token <= used * variant.product_rows:  # bound by memory
            shared //= _SHARED
    end -= shared
    while True:
        for expert in range(experts):
            for piece in range(begin, end):
                group, panel = groups + 12 * (expert + 1), piece
                if op.epilogue != ADD:
                    group, panel = groups + 12 * (piece // panels + 1), piece % panels
                multiply_expert(variant, step, op, mixture, group, panel, sums)
        item = np.int64(0)
        if shared:
            item = atomic_add(counter, 1)
        if item >= shared * step.threads:
            if variant.weights.amx and not op.multiply:
                release_registers()
            return
        begin = pieces * (item % step.threads + 1) // step.threads - shared + item // step.threads
        end = begin + 1


@kernel
def multiply_expert(variant, step, op, mixture, group, panel, sums):
    """Compute one panel of one expert for all of its rows."""
    expert = ints_at(op.weights + load_int(group) * 8 * EXPERT, EXPERT)
    first, end = load_int(group + 4), load_int(group + 8)
    steps = op.inputs // variant.weights.step
    stride, panel_bytes = row_and_panel_bytes(variant, op)
    weights, source = expert[0] + panel * panel_bytes, step.buffers[op.source]
    tiles = (end - first) // variant.product_rows
    if variant.weights.amx and not op.multiply:
        prepare_registers(end - first)
    ahead, pace = weights + bytes_ahead(end - first), _STEP_BYTES
    if tiles > 1:
        ahead, pace = weights + panel_bytes, _STEP_BYTES // tiles
    row = first
    while row < end:
        inputs = source + row * stride
        if op.multiply:
            taken = multiply_quantised(
                op, end - first, row - first, count_rows_at_once(op), inputs, stride, weights, sums
            )
        else:
            taken = multiply_rows(
                variant, end - row, end - first <= variant.product_rows, inputs, stride, weights,
                steps, ahead, pace, sums,
            )  # fmt: skip
        ahead += steps * pace
        deltas = np.int64(0)
        if op.expand:
            deltas = sums + ROWS * 4 * PANEL
            runs, run_of, _ = find_runs(step, op)
            call_adapter_kernel(
                op.expand, runs, run_of, op.site, panel, np.int64(1), row, taken,
                step.buffers[LOW], step.low_stride, deltas, 0,
            )  # fmt: skip
        for i in range(taken):
            own = sums + i * 4 * PANEL
            finish_row(variant, step, op, mixture, expert, panel, row + i, own, deltas)
            if deltas:
                deltas += 4 * PANEL
        row += taken


@kernel
def finish_row(variant, step, op, mixture, expert, panel, row, sums, deltas):
    """Apply the epilogue to a row's sums of one panel, and write the result: activated, gated, or
    added to its token. `deltas`: what its adapter adds, float32 [32]; 0: nothing.
    """
    first, second = load(sums), load(sums + 4 * LANES)
    place = panel * 4 * PANEL
    if expert[1]:
        first = multiply(first, load(expert[1] + place))
        second = multiply(second, load(expert[1] + place + 4 * LANES))
    if deltas:
        first, second = add(first, load(deltas)), add(second, load(deltas + 4 * LANES))
    member = load_int(step.buffers[MEMBERS] + 4 * row)
    part = fill(load_float(step.buffers[PARTS] + 4 * member))
    if mixture.weighs_inputs:  # scaled inputs scale the product alike
        if op.epilogue != ADD:
            first, second = multiply(first, part), multiply(second, part)
        part = fill(1.0)
    if expert[2]:
        first = add(first, load(expert[2] + place))
        second = add(second, load(expert[2] + place + 4 * LANES))
    target = step.buffers[op.target]
    if op.epilogue == GATE:
        gate, up = first, second
        if mixture.paired:
            gate, up = every_other(first, second, 0), every_other(first, second, 1)
        opened = activate(op.activation, bound(gate, mixture, np.int64(0)), op.learned)
        opened, up = bound(opened, mixture, np.int64(1)), cut(up, mixture.limit)
        if mixture.limit > 0.0 and mixture.raised:
            up = add(up, fill(1.0))
        value = multiply(opened, up)
        store_result(variant, op, target, row * op.width + panel * LANES, value)
    elif op.epilogue == ACTIVATE:
        features = row * op.width + panel * PANEL
        first = activate(op.activation, first, op.learned)
        second = activate(op.activation, second, op.learned)
        store_result(variant, op, target, features, first)
        store_result(variant, op, target, features + LANES, second)
    else:
        part = multiply(part, fill(op.scale))
        target += (member // mixture.per_token * op.width + panel * PANEL) * 4
        store(target, fma(first, part, load(target)))
        store(target + 4 * LANES, fma(second, part, load(target + 4 * LANES)))


@kernel
def bound(gate, mixture, opened):
    """Return gates clamped from above if there is a limit of such; `opened`: 1 if activated."""
    if mixture.limit > 0.0 and mixture.bounds_opened == opened:
        return minimum(gate, fill(mixture.limit))
    return gate


@kernel
def join(rank, step, op):
    """target[t] += source[t] * sigmoid(OPENED[t, 0]) * scale."""
    for t in range(rank, step.tokens, step.threads):
        opened = fill(load_float(step.buffers[OPENED] + t * 4 * PANEL))
        part = sigmoid_times(fill(op.scale), opened)
        source, target = step.buffers[op.source], step.buffers[op.target]
        for i in range(t * op.width * 4, (t + 1) * op.width * 4, 4 * LANES):
            store(target + i, fma(load(source + i), part, load(target + i)))
