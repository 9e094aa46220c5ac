"""A whole step: the operations of a model, one after the other, each shared by all threads."""

from __future__ import annotations

import numpy as np

from tgi_trio.shard.cpu_backend.control_block import STOPPED
from tgi_trio.shard.cpu_backend.kernels import entry, kernel
from tgi_trio.shard.cpu_backend.kernels.adapters import call_adapter_kernel, find_runs
from tgi_trio.shard.cpu_backend.kernels.attention import attend
from tgi_trio.shard.cpu_backend.kernels.linear import linear
from tgi_trio.shard.cpu_backend.kernels.linked_calls import (
    address_of,
    call_linked,
    operation_at,
    step_at,
)
from tgi_trio.shard.cpu_backend.kernels.norm import embed, norm, rotate
from tgi_trio.shard.cpu_backend.kernels.quantised.activations import quantise
from tgi_trio.shard.cpu_backend.kernels.quantised.lookup import embed_quantised
from tgi_trio.shard.cpu_backend.kernels.threads import (
    atomic_exchange,
    atomic_load,
    barrier,
    item_counter,
    post,
    wait_for_post,
)
from tgi_trio.shard.cpu_backend.tables import OPERATION, Buffer, Code

EMBED, NORM, LINEAR, ROTATE, QUANTISE, SHRINK = (
    int(code)
    for code in (Code.EMBED, Code.NORM, Code.LINEAR, Code.ROTATE, Code.QUANTISE, Code.SHRINK)
)
LOW = int(Buffer.LOW)
OPERATION_BYTES = OPERATION.itemsize


@kernel
def run_operations(variant, rank, step, operations, control):
    """Run one thread's part of the operations that the step names.

    `operations`: the address of an array of records of `tables.py`. A barrier after each operation
    lets the next one read what all threads have written. Every kernel is called from one place
    only, since it is compiled into each caller anew.
    """
    arrived = step.arrived
    scratch = step.scratch + rank * step.scratch_bytes
    for i in range(step.first, step.end):
        op = operation_at(operations + i * OPERATION_BYTES)
        counter = item_counter(control, i)
        if rank == 0:  # all have left the previous operation, and none has begun the next
            atomic_exchange(item_counter(control, i + 1), 0)
        if op.code == LINEAR:
            linear(variant, rank, step, op, counter, scratch)
        elif op.code == NORM:
            norm(variant, rank, step, op)
        elif op.code == ROTATE:
            rotate(variant, rank, step, op, scratch)
        elif op.code == QUANTISE:
            quantise(variant, rank, step, op, scratch)
        elif op.code == SHRINK:
            runs, _, run_count = find_runs(step, op)
            call_adapter_kernel(
                op.expand, rank, step.threads, runs, run_count, op.site,
                step.buffers[op.source], op.inputs * variant.active_bytes,
                op.inputs // variant.kv.step, step.buffers[LOW], step.low_stride, scratch,
            )  # fmt: skip
        elif op.kernel:
            call_linked(op.kernel, rank, address_of(step), address_of(op), counter, scratch)
        elif op.code == EMBED and op.multiply:
            embed_quantised(rank, step, op, scratch)
        elif op.code == EMBED:
            embed(variant, rank, step, op)
        else:
            attend(variant, step, op, counter, scratch)
        arrived = barrier(control, step.threads, step.spins, arrived)


@entry
def take_part(variant, rank, step_address, operations, control):
    """Rank 0 posts one step, runs its part and returns; a worker runs steps until it is stopped."""
    step = step_at(step_address)
    if rank == 0:
        atomic_exchange(item_counter(control, step.first), 0)
        post(control, step.threads)
    seen = np.int64(0)  # a literal 0 has a separate type
    while True:
        if rank > 0:
            seen = wait_for_post(control, rank, seen)
            if atomic_load(control + STOPPED):
                return
        run_operations(variant, rank, step, operations, control)
        if rank == 0:
            return
