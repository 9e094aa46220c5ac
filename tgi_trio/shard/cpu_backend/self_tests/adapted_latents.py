"""Self-test of adapters around latents, at every start with both, beside `adapters.py`."""

from __future__ import annotations

from typing import Any

import numpy as np

from tgi_trio.shard.checkpoint.numbers import Floats, to_bfloat16, to_float32
from tgi_trio.shard.cpu_backend.adapter_kernels import AdapterKernels
from tgi_trio.shard.cpu_backend.arena import address, allocate_zeroed
from tgi_trio.shard.cpu_backend.machine_code.entry import RUN_LATENTS
from tgi_trio.shard.cpu_backend.self_tests.adapters import pack_halves
from tgi_trio.shard.cpu_backend.self_tests.latents import of_latents
from tgi_trio.shard.cpu_backend.tables import OPERATION, STEP, Buffer, Code, Form
from tgi_trio.shard.cpu_backend.variant import Variant
from tgi_trio.shard.cpu_backend.weight_layout import LANES, PANEL

_TOKENS, _HEADS, _INPUTS, _OUTPUTS, _RANK = 4, 2, 32, 64, 8
_ROOM = _TOKENS + 7  # a tile may read beyond the last one
_RUNS = ((0, 1, False), (1, 3, True))  # first token, tokens, has an adapter


def find_fault(variant: Variant, kernels: AdapterKernels) -> str | None:
    """Return what is wrong with what adapters add to products of heads, or None."""
    kind, draw = of_latents(variant), np.random.default_rng(7)
    x, a, b = (  # small integers: exact in bfloat16, and so are their products
        draw.integers(-1, 2, shape).astype(np.float32)
        for shape in ((_ROOM, _HEADS, _INPUTS), (_HEADS, LANES, _INPUTS), (_OUTPUTS, _RANK))
    )
    rows: Any = to_bfloat16(x) if kind.dot else x
    size = _INPUTS * _OUTPUTS * _HEADS * (2 if kind.kv.bf16 else 4)
    packed = [pack_halves(variant, each) for each in a]
    second, weights = pack_halves(variant, b), allocate_zeroed((size,))  # the base adds nothing
    steps = _RANK // variant.kv.step
    pieces = np.array([[0, _OUTPUTS // PANEL, address(second), 0, steps, 0, steps]], np.int64)
    sites = np.array([[address(each), 1, address(pieces), 1, 0, 0] for each in packed], np.int64)
    runs = np.array([[at, n, address(sites) if has else 0] for at, n, has in _RUNS], np.int64)
    of_tokens = np.repeat(np.arange(len(_RUNS), dtype=np.int32), runs[:, 1])
    low = allocate_zeroed((_ROOM, _HEADS * LANES), np.float32)
    found = allocate_zeroed((_TOKENS, _HEADS, _OUTPUTS), np.float32)

    step, ops = np.zeros((1,), STEP), np.zeros((2,), OPERATION)
    step["tokens"], step["threads"] = _TOKENS, 2
    step["runs"], step["run_of"], step["run_count"] = address(runs), address(of_tokens), len(runs)
    step["low_stride"] = _HEADS * LANES * kind.active_bytes
    for buffer, array in ((Buffer.ATTENDED, rows), (Buffer.LOW, low), (Buffer.MIXED, found)):
        step["buffers"][0, buffer] = address(array)
    ops["code"], ops["expand"] = (
        (Code.SHRINK_HEADS, Code.EXPAND),
        (kernels.shrink.address, kernels.expand.address),
    )
    ops["source"], ops["target"], ops["forms"] = Buffer.ATTENDED, Buffer.MIXED, Form.WIDE
    ops["heads"], ops["width"], ops["weights"] = _HEADS, LANES, address(weights)
    ops["inputs"], ops["span"], ops["outputs"] = _INPUTS, _INPUTS, _OUTPUTS
    scratch, run = allocate_zeroed((1 << 14,)), RUN_LATENTS.open(kind)
    for i in range(len(ops)):
        for rank in range(2):
            run(rank, address(step), address(ops[i : i + 1]), 0, address(scratch))
    v = np.einsum("thi,hri->thr", x[:_TOKENS], a[:, :_RANK])
    if kind.dot:  # V is rounded like activations
        v = to_float32(to_bfloat16(v))
    wanted: Floats = np.asarray(v @ b.T, np.float32)
    wanted[:1] = 0.0
    if np.array_equal(found, wanted):
        return None
    return f"what adapters add around latents is {np.abs(found - wanted).max():g} away"
