"""Products of a matrix with one or two rows, as fast as the matrix can be read.

As many programs as a device runs at once share the matrix. Each keeps the whole rows in registers,
so that the launch includes what comes before and after the product (prologue and epilogue): rows
are summed and normalised once when they are read, and gates are applied to the ups when both are
computed. The next weights are loaded while the present ones are multiplied, and the first ones
before the program waits for the preceding kernels (programmatic dependent launch).
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.activations import activate
from tgi_trio.shard.torch_backend.kernels.fused import add_found, add_scaled, normalise
from tgi_trio.shard.torch_backend.kernels.overlapping import let_next_begin, wait_for_earlier


# fmt: off
@triton.jit(do_not_specialize=["outputs"])
def multiply_few(
    out,  # [ROWS, outputs]
    x,  # [ROWS, INPUTS]
    weight,  # [outputs, INPUTS]; with ACT twice as many outputs: gates, then ups
    bias,  # of each output; read with HAS_BIAS only
    summed,  # [ROWS, INPUTS]: x plus what is added; written with ADDS, which reads the next ones
    first,  # [ROWS, INPUTS]: normalised with FIRST_KIND, then times `scale`
    second,  # [ROWS, INPUTS], with ADDS_SECOND, times `second_scale`
    first_gain,  # [INPUTS], as are the next; read with HAS_FIRST_GAIN
    first_bias,
    gain,
    norm_bias,
    first_eps, eps, scale, second_scale,
    outputs,
    ROWS: tl.constexpr,  # a power of two
    INPUTS: tl.constexpr,
    PADDED: tl.constexpr,  # the next power of two
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr, ADDS_SECOND: tl.constexpr, SCALES: tl.constexpr,
    FIRST_KIND: tl.constexpr,  # "": none
    HAS_FIRST_GAIN: tl.constexpr, HAS_FIRST_BIAS: tl.constexpr,
    KIND: tl.constexpr,  # "": the rows are not normalised
    HAS_GAIN: tl.constexpr, HAS_NORM_BIAS: tl.constexpr,
    ACT: tl.constexpr,  # "": no gates
    OUTPUTS: tl.constexpr,  # that a program computes at a time, a power of two
    OVERLAPS: tl.constexpr,
):
    """Multiply rows by a matrix, with float32 sums."""
    let_next_begin(OVERLAPS)
    dtype = x.dtype.element_ty
    place = tl.arange(0, PADDED)[None, None, :]
    column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)[None, :, None]
    step = tl.num_programs(0) * OUTPUTS
    w, v = load_weights(weight, column, place, outputs, INPUTS, ACT)
    wait_for_earlier(OVERLAPS)
    row = tl.arange(0, ROWS)[:, None]
    a = read_rows(
        x, summed, first, second, first_gain, first_bias, gain, norm_bias, first_eps, eps, scale,
        second_scale, ROWS, INPUTS, PADDED, ADDS, ADDS_SECOND, SCALES, FIRST_KIND, HAS_FIRST_GAIN,
        HAS_FIRST_BIAS, KIND, HAS_GAIN, HAS_NORM_BIAS,
    )[:, None, :].to(tl.float32)
    for low in range(0, outputs, step):
        next_w, next_v = load_weights(weight, column + low + step, place, outputs, INPUTS, ACT)
        found = tl.sum(w.to(tl.float32) * a, 2)
        now = low + tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]
        there = now < outputs
        if HAS_BIAS:
            found += tl.load(bias + now, mask=there, other=0.0).to(tl.float32)
        if ACT != "":
            up = tl.sum(v.to(tl.float32) * a, 2)
            if HAS_BIAS:
                up += tl.load(bias + outputs + now, mask=there, other=0.0).to(tl.float32)
            opened = activate(found.to(dtype).to(tl.float32), ACT).to(dtype).to(tl.float32)
            found = opened * up.to(dtype).to(tl.float32)
        tl.store(out + row * outputs + now, found.to(dtype), mask=there)
        w, v = next_w, next_v


@triton.jit
def read_rows(
    x, summed, first, second, first_gain, first_bias, gain, norm_bias, first_eps, eps, scale,
    second_scale,
    ROWS: tl.constexpr, INPUTS: tl.constexpr, PADDED: tl.constexpr,
    ADDS: tl.constexpr, ADDS_SECOND: tl.constexpr, SCALES: tl.constexpr,
    FIRST_KIND: tl.constexpr, HAS_FIRST_GAIN: tl.constexpr, HAS_FIRST_BIAS: tl.constexpr,
    KIND: tl.constexpr, HAS_GAIN: tl.constexpr, HAS_NORM_BIAS: tl.constexpr,
):
    """Return the rows to multiply, summed and normalised, [ROWS, PADDED]; see `multiply_few`."""
    dtype = x.dtype.element_ty
    place = tl.arange(0, PADDED)[None, :]
    at = tl.arange(0, ROWS)[:, None] * INPUTS + place
    inside = place < INPUTS
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        more = tl.load(first + at, mask=inside, other=0.0).to(tl.float32)
        value = add_found(
            value, more, place, first_gain, first_bias, first_eps, scale, dtype,
            INPUTS, SCALES, FIRST_KIND, HAS_FIRST_GAIN, HAS_FIRST_BIAS,
        )
        if ADDS_SECOND:
            more = tl.load(second + at, mask=inside, other=0.0).to(tl.float32)
            value = add_scaled(value, more, second_scale, dtype)
        if tl.program_id(0) == 0:
            tl.store(summed + at, value.to(dtype), mask=inside)
    if KIND != "":
        value = normalise(value, place, gain, norm_bias, eps, INPUTS, KIND, HAS_GAIN, HAS_NORM_BIAS)
    return value.to(dtype)
# fmt: on


@triton.jit
def load_weights(weight, column, place, outputs, INPUTS: tl.constexpr, ACT: tl.constexpr):
    """Return weights [1, columns, places], and with ACT those of the ups that belong to gates."""
    inside = (column < outputs) & (place < INPUTS)
    at = weight + column.to(tl.int64) * INPUTS + place
    w = tl.load(at, mask=inside, other=0.0)
    v = w
    if ACT != "":
        v = tl.load(at + outputs.to(tl.int64) * INPUTS, mask=inside, other=0.0)
    return w, v
