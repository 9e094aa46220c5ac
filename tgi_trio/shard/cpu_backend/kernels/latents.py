"""Around multi-head latent attention (DeepSeek-V2, 2024, section 2.1): what precedes and follows.

The keys and values of all heads are linear in one vector of a token, its latent. The cache holds
the latent and one rotated key, which all heads share. The matrices that would expand a latent to a
head's key and value are multiplied with the head's query and with its result instead:

    q . (K c) = (K^T q) . c        sum of p (V c) = V (sum of p c)

So for `attention.py` there is one KV head. Its key is the latent followed by the rotated part; its
value is the same once more, since the cache stores K in panels and V in rows.
"""

from __future__ import annotations

from tgi_trio.shard.cpu_backend.kernels import entry, kernel
from tgi_trio.shard.cpu_backend.kernels.adapters import call_adapter_kernel, find_runs
from tgi_trio.shard.cpu_backend.kernels.linear import multiply_rows
from tgi_trio.shard.cpu_backend.kernels.linked_calls import latent_at, operation_at, step_at
from tgi_trio.shard.cpu_backend.kernels.matrix_unit import prepare_registers, release_registers
from tgi_trio.shard.cpu_backend.kernels.norm import (
    head_factor,
    inverse_deviation,
    normed,
    query_factor,
    store_key_and_value,
    turn,
    turning_row,
)
from tgi_trio.shard.cpu_backend.kernels.quantised.activations import store_forms, store_result
from tgi_trio.shard.cpu_backend.kernels.vectors import (
    add,
    copy_word,
    fill,
    load,
    load_int,
    multiply,
    store,
    store_active,
    store_query,
)
from tgi_trio.shard.cpu_backend.tables import Buffer, Code
from tgi_trio.shard.cpu_backend.weight_layout import LANES, PANEL

COMPRESS, TURN, ABSORB, SHRINK_HEADS = (
    int(code) for code in (Code.COMPRESS, Code.TURN, Code.ABSORB, Code.SHRINK_HEADS)
)
PROJECTED, QUERY, LOW = int(Buffer.PROJECTED), int(Buffer.QUERY), int(Buffer.LOW)
_STEP_BYTES = 4 * PANEL


@entry
def run_latents(variant, rank, step_address, op_address, counter, scratch):
    """Run one thread's part of an operation around latent attention."""
    step, op = step_at(step_address), operation_at(op_address)
    latent = latent_at(op.facts)
    if op.code == COMPRESS:
        compress(variant, rank, step, op)
    elif op.code == TURN:
        turn_parts(variant, rank, step, op, latent, scratch)
    elif op.code == SHRINK_HEADS:
        shrink_heads(variant, rank, step, op, scratch)
    else:
        multiply_heads(variant, rank, step, op, scratch)


@kernel
def compress(variant, rank, step, op):
    """target[t] = RMSNorm of the first `width` of the `inputs` features of a row of `source`.

    They follow once more, as they are, if there is room among the `outputs` of a row.
    """
    for t in range(rank, step.tokens, step.threads):
        source = step.buffers[op.source] + t * op.inputs * 4
        factor = fill(inverse_deviation(source, op.width, 0.0, op.eps))
        for i in range(0, op.width, 2 * LANES):
            first = normed(op, source, i, fill(0.0), factor)
            second = normed(op, source, i + LANES, fill(0.0), factor)
            store_forms(variant, step, op, t * op.outputs + i, first, second)
        for i in range(0, op.outputs - op.width, 2 * LANES):
            first, second = load(source + 4 * i), load(source + 4 * i + 4 * LANES)
            store_forms(variant, step, op, t * op.outputs + op.width + i, first, second)


@kernel
def turn_parts(variant, rank, step, op, latent, scratch):
    """Split queries: write the part to be rotated to QUERY, the rest to `target`. Cache the keys,
    unless they are another layer's.

    `scratch`: room for two keys.
    """
    size, turned = op.head_dim, latent.rotary_dim
    room = scratch + 4 * size
    for t in range(rank, step.tokens, step.threads):
        row = turning_row(step, op, t, 0)
        cosines, sines = op.cosines + row, op.sines + row
        of_token = query_factor(step, op, t)
        for head in range(op.heads):
            factor = multiply(of_token, fill(head_factor(step, op, t, head)))
            query = step.buffers[op.source] + t * latent.query_width * 4
            query += head * (latent.plain_dim + turned) * 4
            place = t * op.heads + head
            target = step.buffers[op.target] + place * latent.plain_dim * variant.active_bytes
            for i in range(0, latent.plain_dim, LANES):
                store_active(
                    variant, target + i * variant.active_bytes,
                    multiply(load(query + 4 * i), factor),
                )  # fmt: skip
            turn_part(op, query + 4 * latent.plain_dim, turned, cosines, sines, room)
            target = step.buffers[QUERY] + (place * size + latent.rank) * variant.query_bytes
            for i in range(0, turned, LANES):
                value = multiply(load(room + 4 * i), factor)
                store_query(variant, target + i * variant.query_bytes, value)
        if op.reads_only:
            continue
        key = step.buffers[PROJECTED] + (t * op.inputs + latent.place) * 4
        norm = fill(inverse_deviation(key, latent.rank, 0.0, op.eps))
        for i in range(0, latent.rank, LANES):
            value = multiply(multiply(load(key + 4 * i), norm), load(op.weights + 4 * i))
            store(scratch + 4 * i, value)
        end = 4 * latent.rank
        turn_part(op, key + end, turned, cosines, sines, scratch + end)
        store_key_and_value(variant, step, op, t, 0, scratch, scratch, room)


@kernel
def turn_part(op, x, size, cosines, sines, target):
    """Write [size] numbers, reordered so that pairs are half of them apart, and rotated."""
    for i in range(size):
        copy_word(target + 4 * i, x + 4 * load_int(op.order + 4 * i))
    turn(target, op, cosines, sines)


@kernel
def shrink_heads(variant, rank, step, op, sums):
    """Write V of each head, of the `inputs` of its `span` features in `source`; see `adapters.py`.

    Heads have adapters' sites of their own, one behind the other, and `width` features in a row of
    LOW. They begin with different threads, since a head of few rows has work for one.
    `sums`: float32 [32, 16].
    """
    runs, _, run_count = find_runs(step, op)
    stride = op.heads * op.span * variant.active_bytes
    for head in range(op.heads):
        call_adapter_kernel(
            op.expand, (rank + head) % step.threads, step.threads, runs, run_count, op.site + head,
            step.buffers[op.source] + head * op.span * variant.active_bytes, stride,
            op.inputs // variant.kv.step,
            step.buffers[LOW] + head * op.width * variant.active_bytes, step.low_stride, sums,
        )  # fmt: skip


@kernel
def multiply_heads(variant, rank, step, op, sums):
    """Multiply `inputs` of the `span` features that each head has in `source` with the head's own
    matrix, giving `outputs` features: for ABSORB in their place in QUERY, else in `target`.

    Each thread has its own panels, for all rows. `sums`: float32 [product_rows, 32],
    then as much for what adapters add.
    """
    panels = op.outputs // PANEL
    steps = op.inputs // variant.weights.step
    items = op.heads * panels
    stride = op.heads * op.span * variant.active_bytes
    if variant.weights.amx:
        prepare_registers(step.tokens)
    for item in range(items * rank // step.threads, items * (rank + 1) // step.threads):
        head, panel = item // panels, item % panels
        source = step.buffers[op.source] + head * op.span * variant.active_bytes
        weights = op.weights + item * steps * _STEP_BYTES
        row = item - item  # a literal 0 would have a separate type
        while row < step.tokens:
            taken = multiply_rows(
                variant, step.tokens - row, step.tokens <= variant.product_rows,
                source + row * stride, stride, weights, steps,
                weights + steps * _STEP_BYTES, _STEP_BYTES, sums,
            )  # fmt: skip
            deltas = sums + variant.product_rows * 4 * PANEL
            if op.expand:
                runs, run_of, _ = find_runs(step, op)
                low = step.buffers[LOW] + head * op.width * variant.active_bytes
                call_adapter_kernel(
                    op.expand, runs, run_of, op.site + head, panel, 1, row, taken, low,
                    step.low_stride, deltas, 0,
                )  # fmt: skip
            for i in range(taken):
                first, second = load(sums + i * 4 * PANEL), load(sums + i * 4 * PANEL + 4 * LANES)
                if op.expand:
                    first = add(first, load(deltas + i * 4 * PANEL))
                    second = add(second, load(deltas + i * 4 * PANEL + 4 * LANES))
                place = (row + i) * op.heads + head
                if op.code == ABSORB:
                    place = place * op.head_dim + panel * PANEL
                    target = step.buffers[QUERY] + place * variant.query_bytes
                    store_query(variant, target, first)
                    store_query(variant, target + LANES * variant.query_bytes, second)
                else:
                    place = place * op.outputs + panel * PANEL
                    store_result(variant, op, step.buffers[op.target], place, first)
                    store_result(variant, op, step.buffers[op.target], place + LANES, second)
            row += taken
    if variant.weights.amx:
        release_registers()
