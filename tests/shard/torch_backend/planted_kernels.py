"""Kernels that have a defect each, and their like without it, for tests of the sanitizer."""

# mypy: ignore-errors
# Triton infers the types of kernels; mypy cannot follow it.

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.overlapping import let_next_begin, wait_for_earlier


@triton.jit
def copy(out, x, count, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count if MASKED else at >= 0
    tl.store(out + at, tl.load(x + at, mask=mask), mask=mask)


@triton.jit
def read_wide(out, x, OFFSET: tl.constexpr):
    tl.store(out, tl.load((x + OFFSET).to(tl.pointer_type(tl.int32))))


@triton.jit
def promise(out, x):
    tl.store(out, tl.multiple_of(tl.load(x), 16))


@triton.jit
def read_row(out, x, row, stride, WIDE: tl.constexpr):
    at = row.to(tl.int64) * stride if WIDE else row * stride
    tl.store(out, tl.load(x + at))


@triton.jit
def read_slots(out, x, slots, stride, WIDE: tl.constexpr):
    own = tl.program_id(0)
    slot = tl.load(slots + own)
    at = slot * stride if WIDE else slot.to(tl.int32) * stride
    tl.store(out + own, tl.load(x + at))


@triton.jit
def write_one(out, SAME: tl.constexpr):
    tl.store(out, 1 if SAME else tl.program_id(0))


@triton.jit
def read_next(out, x):
    own = tl.program_id(0)
    tl.store(x + own, own)
    tl.store(out + own, tl.load(x + own + 1))


@triton.jit
def add_parts(
    out, parts, arrived,
    BLOCK: tl.constexpr, BARRIER: tl.constexpr, SEM: tl.constexpr, SCOPE: tl.constexpr,
):  # fmt: skip
    own, at = tl.program_id(0), tl.arange(0, BLOCK)
    tl.store(parts + own * BLOCK + at, at + own)
    if BARRIER:
        tl.debug_barrier()
    if tl.atomic_add(arrived, 1, sem=SEM, scope=SCOPE) == tl.num_programs(0) - 1:
        tl.store(arrived, 0)
        total = tl.zeros([BLOCK], tl.int32)
        for i in range(tl.num_programs(0)):
            total += tl.load(parts + i * BLOCK + at)
        tl.store(out + at, total)


@triton.jit
def turn(out, x, BLOCK: tl.constexpr, BARRIER: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, at)
    if BARRIER:
        tl.debug_barrier()
    tl.store(out + at, tl.load(x + BLOCK - 1 - at))


@triton.jit
def increase(x, BLOCK: tl.constexpr, BARRIER: tl.constexpr):
    at = tl.arange(0, BLOCK)
    new = tl.load(x + at) + 1
    if BARRIER:
        tl.debug_barrier()
    tl.store(x + at, new)


@triton.jit
def take_first(out, x, BLOCK: tl.constexpr, BARRIER: tl.constexpr):
    """All threads read a number, before or while one of them overwrites it."""
    at = tl.arange(0, BLOCK)
    first = tl.load(x)
    if BARRIER:
        tl.debug_barrier()
    tl.store(x + at, tl.load(x + at) + 1)
    tl.store(out, first)


@triton.jit
def fold(out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at // 2, at)


@triton.jit
def claim(out, counter):
    place = tl.atomic_add(counter, 1)
    tl.store(out + place, tl.program_id(0))
    if place == tl.num_programs(0) - 1:
        tl.store(counter, 0)


@triton.jit
def count_twice(counters, RESETS: tl.constexpr):
    tl.atomic_add(counters + 1, 1)
    tl.debug_barrier()
    if tl.atomic_add(counters, 1) == tl.num_programs(0) - 1:
        tl.store(counters, 0)
        if RESETS:
            tl.atomic_xchg(counters + 1, 0)


@triton.jit
def add_two(out, x, USED: tl.constexpr):
    first, second = tl.load(x), tl.load(x + 1)
    tl.store(out, first + (second if USED else 0))


@triton.jit
def produce(out, OVERLAPS: tl.constexpr, WAITS_FIRST: tl.constexpr):
    if WAITS_FIRST:
        wait_for_earlier(OVERLAPS)
    let_next_begin(OVERLAPS)
    if not WAITS_FIRST:
        wait_for_earlier(OVERLAPS)
    tl.store(out, 1)


@triton.jit
def consume(out, x, where, OVERLAPS: tl.constexpr):
    """Read `x`, and write to `out`, before the wait, behind it, or without one."""
    let_next_begin(OVERLAPS)
    early = 0
    if where == 1:
        early = tl.load(x)
    if where == 2:
        tl.store(out, 1)
    if where != 3:
        wait_for_earlier(OVERLAPS)
        tl.store(out, tl.load(x) + early)
