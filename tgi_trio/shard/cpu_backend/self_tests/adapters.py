"""Self-test of the adapters' kernels with random numbers, at every start with adapters."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.checkpoint.numbers import to_bfloat16
from tgi_trio.shard.cpu_backend.adapter_kernels import AdapterKernels
from tgi_trio.shard.cpu_backend.arena import address, allocate_zeroed
from tgi_trio.shard.cpu_backend.variant import Variant
from tgi_trio.shard.cpu_backend.weight_layout import LANES, PANEL

_TOKENS, _INPUTS, _RANK, _PANELS = 13, 32, 8, 3  # the second panel's outputs are adapted
_RUNS = ((0, 2, False), (2, 10, True), (12, 1, True))  # first token, tokens, has an adapter


def find_fault(variant: Variant, kernels: AdapterKernels) -> str | None:
    """Return what is wrong with the kernels, or None; they have been compiled already."""
    draw = np.random.default_rng(5)
    x, a, b = (  # small integers: exact in bfloat16, and so are their products
        draw.integers(-2, 3, shape).astype(np.float32)
        for shape in ((_TOKENS, _INPUTS), (LANES, _INPUTS), (PANEL, _RANK))
    )
    low_stride = LANES * variant.active_bytes
    active = to_bfloat16(x) if variant.dot else x
    low, scratch = allocate_zeroed((_TOKENS * low_stride,)), allocate_zeroed((1 << 13,))
    packed_a, packed_b = pack_halves(variant, a), pack_halves(variant, b)
    steps = _RANK // variant.kv.step
    pieces = np.array([[1, 2, address(packed_b), 0, steps, 0, steps]], np.int64)
    sites = np.array([[address(packed_a), 1, address(pieces), 1, 0, 0]], np.int64)
    runs = np.array([[at, n, address(sites) if has else 0] for at, n, has in _RUNS], np.int64)
    of_tokens = np.repeat(np.arange(3, dtype=np.int32), runs[:, 1])
    for rank in range(2):
        kernels.shrink(
            rank, 2, address(runs), 3, 0, address(active), _INPUTS * variant.active_bytes,
            _INPUTS // variant.kv.step, address(low), low_stride, address(scratch),
        )  # fmt: skip
    found = np.full((_PANELS, _TOKENS, PANEL), np.nan, np.float32)
    kernels.expand(
        address(runs), address(of_tokens), 0, 0, _PANELS, 0, _TOKENS, address(low),
        low_stride, address(found), 0,
    )  # fmt: skip
    wanted = np.zeros_like(found)
    v = x @ a[:_RANK].T
    if variant.dot:  # V is rounded like activations
        v = (to_bfloat16(v).astype(np.uint32) << 16).view(np.float32)
    wanted[1, 2:] = (v @ b.T)[2:]
    if np.array_equal(found, wanted):
        return None
    return f"what adapters add is {np.abs(found - wanted).max():g} away from the reference"


def pack_halves(variant: Variant, matrix: NDArray[np.float32]) -> NDArray[Any]:
    """Return a matrix packed as [outputs / 16, steps, 16]."""
    numbers: NDArray[Any] = matrix
    if variant.kv.bf16:
        numbers = to_bfloat16(matrix).view(np.uint32)
    return np.ascontiguousarray(numbers.reshape(-1, LANES, numbers.shape[1]).swapaxes(1, 2))
