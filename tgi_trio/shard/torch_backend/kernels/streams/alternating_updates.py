"""What lies between the products of layers that compute one of several hidden states of a token.

They are those of `layers/streams/alternating_updates.py`. A program has all of a token's states, so
a token's numbers depend on nothing else in a step. Sums are float32; results are rounded where
torch's separate operations would round them. Offsets are of 64 bits wherever tokens are involved.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.activations import activate
from tgi_trio.shard.torch_backend.kernels.fused import load_normalised, normalise
from tgi_trio.shard.torch_backend.kernels.overlapping import let_next_begin, wait_for_earlier


@triton.jit
def load_streams(
    streams,  # [COUNT, T, SIZE]
    added,  # [T, SIZE], read with ADDS: normalised, it is added to all states but the first
    gain,
    eps,
    token,
    tokens,
    stream,  # [padded COUNT, 1]
    place,  # [1, padded SIZE]
    SIZE: tl.constexpr,
    COUNT: tl.constexpr,
    ADDS: tl.constexpr,
    KIND: tl.constexpr,
):
    """Return a token's hidden states, float32 [padded COUNT, padded SIZE]."""
    dtype = streams.dtype.element_ty
    real = (stream < COUNT) & (place < SIZE)
    x = tl.load(streams + (stream * tokens + token) * SIZE + place, mask=real, other=0.0)
    x = x.to(tl.float32)
    if ADDS:
        more = load_normalised(
            added + token * SIZE, gain, gain, eps, place, SIZE, KIND, True, False
        )
        more = more.to(dtype).to(tl.float32)
        x = tl.where(stream > 0, (x + more).to(dtype).to(tl.float32), x)
    return x


@triton.jit
def take_stream(x, stream, WHICH: tl.constexpr):
    """Return one of the states `x` [padded COUNT, padded SIZE], as [1, padded SIZE]."""
    return tl.sum(tl.where(stream == WHICH, x, 0.0), 0)[None, :]


@triton.jit
def find_routes(
    x,  # float32 [1, padded SIZE]
    router,  # [COUNT, SIZE]
    gain,
    eps,
    dtype: tl.constexpr,
    stream,
    place,
    SIZE: tl.constexpr,
    COUNT: tl.constexpr,
    KIND: tl.constexpr,
):
    """Return routing weights between -1 and 1, float32 [padded COUNT]."""
    x = normalise(x, place, gain, gain, eps, SIZE, KIND, True, False).to(dtype).to(tl.float32)
    x = (x / SIZE).to(dtype).to(tl.float32)
    real = (stream < COUNT) & (place < SIZE)
    weight = tl.load(router + stream * SIZE + place, mask=real, other=0.0).to(tl.float32)
    found = tl.sum(weight * x, 1).to(dtype).to(tl.float32)
    return (2.0 * tl.sigmoid(2.0 * found) - 1.0).to(dtype).to(tl.float32)  # tanh


@triton.jit(do_not_specialize=["tokens"])
def predict_streams(
    normed,  # [T, SIZE]: the norm of the state that the layer computes, as predicted
    predicted,  # [COUNT, T, SIZE]
    streams,  # [COUNT, T, SIZE]
    added,  # see `load_streams`
    added_gain,  # [SIZE], as are the next two
    router_gain,
    gain,
    router,  # [COUNT, SIZE]
    prediction,  # [COUNT * COUNT, COUNT]
    added_eps,
    router_eps,
    eps,
    tokens,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,  # the next power of two, as is PADDED_COUNT
    COUNT: tl.constexpr,
    PADDED_COUNT: tl.constexpr,
    ACTIVE: tl.constexpr,
    ADDS: tl.constexpr,
    KIND: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Add to each state a sum of all, whose weights follow from the state that layers compute."""
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    dtype = streams.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    stream, place = tl.arange(0, PADDED_COUNT)[:, None], tl.arange(0, PADDED)[None, :]
    x = load_streams(
        streams, added, added_gain, added_eps, token, tokens, stream, place,
        SIZE, COUNT, ADDS, KIND,
    )  # fmt: skip
    active = take_stream(x, stream, ACTIVE)
    routes = find_routes(
        active, router, router_gain, router_eps, dtype, stream, place, SIZE, COUNT, KIND
    )
    other = tl.arange(0, PADDED_COUNT)
    found = tl.zeros([PADDED_COUNT, PADDED], tl.float32)
    for each in tl.static_range(COUNT):
        at = prediction + (stream * COUNT + each) * COUNT + other[None, :]
        real = (stream < COUNT) & (other[None, :] < COUNT)
        weight = tl.sum(tl.load(at, mask=real, other=0.0).to(tl.float32) * routes[None, :], 1)
        found += weight.to(dtype).to(tl.float32)[:, None] * take_stream(x, stream, each)
    found = (found.to(dtype).to(tl.float32) + x).to(dtype)
    real = (stream < COUNT) & (place < SIZE)
    tl.store(predicted + (stream * tokens + token) * SIZE + place, found, mask=real)
    active = take_stream(found.to(tl.float32), stream, ACTIVE)
    active = normalise(active, place, gain, gain, eps, SIZE, KIND, True, False)
    tl.store(normed + token * SIZE + place, active.to(dtype), mask=place < SIZE)


@triton.jit
def join_detour(
    summed,  # [T, SIZE]
    normed,  # [T, SIZE]: the norm of the sum
    active,  # [T, SIZE]: the state that the layer computes, as predicted
    mixed,  # [T, SIZE]: what attention says, which is normalised
    read,  # [T, SIZE]: what attention and the detour have read
    detour,  # [T, SIZE]: what the detour says, which is normalised
    mixed_gain,
    detour_gain,
    gain,
    mixed_eps,
    detour_eps,
    eps,
    scale,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    KIND: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Compute scale * (active + norm(mixed) + (read + norm(detour))), and its norm."""
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    dtype = active.dtype.element_ty
    place = tl.arange(0, PADDED)[None, :]
    token = tl.program_id(0).to(tl.int64)
    inside, at = place < SIZE, token * SIZE + place
    x = load_normalised(
        mixed + token * SIZE, mixed_gain, mixed_gain, mixed_eps, place, SIZE, KIND, True, False
    )
    x = x.to(dtype).to(tl.float32) + tl.load(active + at, mask=inside, other=0.0).to(tl.float32)
    y = load_normalised(
        detour + token * SIZE, detour_gain, detour_gain, detour_eps, place, SIZE, KIND, True, False
    )
    y = y.to(dtype).to(tl.float32) + tl.load(read + at, mask=inside, other=0.0).to(tl.float32)
    x = x.to(dtype).to(tl.float32) + y.to(dtype).to(tl.float32)
    x = (x.to(dtype).to(tl.float32) * scale).to(dtype)
    tl.store(summed + at, x, mask=inside)
    x = normalise(x.to(tl.float32), place, gain, gain, eps, SIZE, KIND, True, False)
    tl.store(normed + at, x.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def correct_streams(
    corrected,  # [COUNT, T, SIZE]
    shown,  # [T, SIZE]: the corrected state that layers compute, times `scale` with SCALES
    predicted,  # [COUNT, T, SIZE]
    x,  # [T, SIZE]: before the MLP
    found,  # [T, SIZE]: what the MLP says, which is normalised and added to `x`
    found_gain,  # [SIZE], as are the next two
    router_gain,
    scale,
    router,  # [COUNT, SIZE]
    correction,  # [COUNT, COUNT]
    found_eps,
    router_eps,
    tokens,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    COUNT: tl.constexpr,
    PADDED_COUNT: tl.constexpr,
    ACTIVE: tl.constexpr,
    SCALES: tl.constexpr,
    KIND: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Add to each state its share of what the prediction of the computed one has missed."""
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    dtype = predicted.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    stream, place = tl.arange(0, PADDED_COUNT)[:, None], tl.arange(0, PADDED)[None, :]
    inside, at = place < SIZE, token * SIZE + place
    computed = load_normalised(
        found + token * SIZE, found_gain, found_gain, found_eps, place, SIZE, KIND, True, False
    )
    computed = computed.to(dtype).to(tl.float32)
    computed += tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    computed = computed.to(dtype).to(tl.float32)
    routes = find_routes(
        computed, router, router_gain, router_eps, dtype, stream, place, SIZE, COUNT, KIND
    )
    other = tl.arange(0, PADDED_COUNT)[None, :]
    real = (stream < COUNT) & (other < COUNT)
    weight = tl.load(correction + stream * COUNT + other, mask=real, other=0.0).to(tl.float32)
    weight = tl.sum(weight * routes[None, :], 1).to(dtype).to(tl.float32)
    weight = (weight + 1.0).to(dtype).to(tl.float32)
    real = (stream < COUNT) & inside
    row = (stream * tokens + token) * SIZE + place
    states = tl.load(predicted + row, mask=real, other=0.0).to(tl.float32)
    missed = (computed - take_stream(states, stream, ACTIVE)).to(dtype).to(tl.float32)
    missed = (missed * weight[:, None]).to(dtype).to(tl.float32)
    states = (missed + states).to(dtype)
    tl.store(corrected + row, states, mask=real)
    active = take_stream(states.to(tl.float32), stream, ACTIVE)
    if SCALES:
        active = active * tl.load(scale + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(shown + at, active.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def add_to_others(
    summed,  # [COUNT - 1, T, SIZE]
    streams,  # [COUNT, T, SIZE]
    added,  # see `load_streams`
    gain,
    eps,
    tokens,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    COUNT: tl.constexpr,
    PADDED_COUNT: tl.constexpr,
    KIND: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Compute all states of a token but the first, with what the last layer adds to them."""
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    stream, place = tl.arange(0, PADDED_COUNT)[:, None], tl.arange(0, PADDED)[None, :]
    x = load_streams(
        streams, added, gain, eps, token, tokens, stream, place, SIZE, COUNT, True, KIND
    )
    real = (stream > 0) & (stream < COUNT) & (place < SIZE)
    at = ((stream - 1) * tokens + token) * SIZE + place
    tl.store(summed + at, x.to(summed.dtype.element_ty), mask=real)


@triton.jit
def measure_rows(x, SIZE: tl.constexpr, dtype: tl.constexpr):
    """Return the mean square of each row of `x` [rows, padded SIZE], 0 beyond SIZE."""
    squares = (x * x).to(dtype).to(tl.float32)
    return (tl.sum(squares, 1) / SIZE).to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["tokens"])
def match_streams(
    out,  # [COUNT, T, SIZE]; with JOINS [T, SIZE]
    first,  # [T, SIZE]
    others,  # [COUNT - 1, T, SIZE]
    least,  # the smallest mean square whose root divides
    tokens,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    COUNT: tl.constexpr,
    PADDED_COUNT: tl.constexpr,
    JOINS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Give all states of a token the root mean square of the first one; JOINS: return the mean."""
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    dtype = out.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    stream, place = tl.arange(0, PADDED_COUNT)[:, None], tl.arange(0, PADDED)[None, :]
    inside, at = place < SIZE, token * SIZE + place
    like = tl.load(first + at, mask=inside, other=0.0).to(tl.float32)
    other, row = (stream > 0) & (stream < COUNT) & inside, (stream - 1) * tokens + token
    x = tl.load(others + row * SIZE + place, mask=other, other=0.0).to(tl.float32)
    wanted = tl.sqrt_rn(measure_rows(like, SIZE, dtype)).to(dtype).to(tl.float32)
    own = tl.maximum(measure_rows(x, SIZE, dtype), least).to(dtype).to(tl.float32)
    own = tl.sqrt_rn(own).to(dtype).to(tl.float32)
    x = (x * wanted[:, None]).to(dtype).to(tl.float32)
    x = tl.div_rn(x, own[:, None]).to(dtype).to(tl.float32)
    x = tl.where(stream == 0, like, x)
    if JOINS:
        tl.store(out + at, (tl.sum(x, 0) / COUNT)[None, :].to(dtype), mask=inside)
    else:
        real = (stream < COUNT) & inside
        tl.store(out + (stream * tokens + token) * SIZE + place, x.to(dtype), mask=real)


@triton.jit
def cut_and_gate(
    out,  # [T, SIZE]
    inner,  # [T, 2 SIZE]: gates, then ups; PAIRED: alternating
    deviations,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    ACT: tl.constexpr,
    PAIRED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Compute act(what gates exceed a bound by, at least 0) * up.

    The bound is the mean of a token's gates and so many of their standard `deviations`.
    """
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    dtype = out.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PADDED)
    inside = place < SIZE
    source = inner + token * 2 * SIZE + place * (2 if PAIRED else 1)
    gates = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(gates, 0) / SIZE
    apart = tl.where(inside, gates - mean, 0.0)
    spread = tl.sqrt_rn(tl.sum(apart * apart, 0) / SIZE).to(dtype).to(tl.float32)
    bound = (spread * deviations).to(dtype).to(tl.float32) + mean.to(dtype).to(tl.float32)
    gates = (gates - bound.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    gates = tl.where(gates < 0.0, 0.0, gates)  # NaN stays NaN
    up = tl.load(source + (1 if PAIRED else SIZE), mask=inside, other=0.0).to(tl.float32)
    opened = activate(gates, ACT).to(dtype).to(tl.float32)
    tl.store(out + token * SIZE + place, (opened * up).to(dtype), mask=inside)
