"""Self-test of rare operations with random numbers, at every start of a model that has any."""

from __future__ import annotations

from typing import Any

import numpy as np

from tgi_trio.shard.checkpoint.numbers import Floats, to_bfloat16, to_float32
from tgi_trio.shard.cpu_backend.arena import address, allocate_zeroed
from tgi_trio.shard.cpu_backend.machine_code.entry import RUN_RARE
from tgi_trio.shard.cpu_backend.self_tests.alone import run_alone
from tgi_trio.shard.cpu_backend.tables import (
    OPENING,
    OWN,
    Activation,
    Buffer,
    Code,
    Form,
    GroupNorm,
)
from tgi_trio.shard.cpu_backend.variant import Variant, narrowed

_TOKENS, _SIZE, _EPS = 3, 64, 1e-5
_POSITIONS = (5, 0, 2)  # and token ids
# Operations whose results are in another buffer.
_ELSEWHERE = (Code.PASS_ON, Code.OPEN, Code.CUT, Code.COPY, Code.GATE_NORM)
_ROWS, _SCALE = 4, 0.25
_CUTTING = {"activation": Activation.SILU, "forms": Form.WIDE}


def find_fault(variant: Variant) -> str | None:
    """Return what is wrong with the kernels of these numbers, or None."""
    draw = np.random.default_rng(7)
    gain = draw.standard_normal(_SIZE, np.float32)
    x = to_float32(to_bfloat16(draw.standard_normal((_TOKENS, _SIZE), np.float32)))
    table = to_float32(to_bfloat16(draw.standard_normal((8, _SIZE), np.float32)))
    weight, bias = draw.standard_normal((2, 32), np.float32)
    wide_bias = np.tile(bias, 2)
    stored = to_bfloat16(table) if variant.kv.bf16 else table
    order = np.arange(31, -1, -1, dtype=np.int32)
    placed = x + table[np.array(_POSITIONS) + 1]
    normed, part = x.copy(), x[:, 32:]
    centred = part - part.mean(axis=1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(axis=1, keepdims=True) + _EPS)
    normed[:, 32:] = centred / deviation * weight + bias
    norm = {"weights": address(weight), "bias": address(bias), "eps": _EPS, "centred": 1}
    wide = {"weights": address(gain), "bias": address(wide_bias)}
    cases: list[tuple[Code, Floats, dict[str, Any]]] = [
        (Code.PLACE, placed, {"weights": address(stored), "offset": 1}),
        (Code.NORM_ROWS, normed, {"inputs": 32, "offset": 32, **norm}),
        (Code.NORM_ROWS, _heads(x, gain, wide_bias), {"inputs": _SIZE, **norm, **wide}),
        (Code.PASS_ON, x, {"inputs": _SIZE, "span": _SIZE, "forms": Form.WIDE}),
        (Code.REORDER, _turned(x), {"order": address(order)}),
        (Code.SCALE, x * np.float32(_SCALE), {"scale": _SCALE}),
        (Code.CUT, _cut(x), {"width": 32, "scale": _SCALE, "target": Buffer.UNSORTED, **_CUTTING}),
        (Code.COPY, _copied(x), {"inputs": 32, "offset": 32, "target": Buffer.UNSORTED}),
        (Code.GATE_NORM, _closed(x), {"inputs": _SIZE, "forms": Form.WIDE}),
        (Code.OWN_INPUT, _own_input(x, table, gain), _own_input_fields(stored, gain)),
        *((Code.OPEN, _opened(x, kind, gain), _opening(kind, gain)) for kind in GroupNorm),
    ]
    for code, expected, fields in cases:
        found = _run(variant, code, x, fields)
        error = float(np.abs(found - expected).max())
        if not error < 1e-5:
            return f"{code.name} is {error:.2g} away from the reference"
    return None


def _heads(x: Floats, gain: Floats, bias: Floats) -> Floats:
    """Return rows of two heads of 32 numbers, each normalised with its own weights."""
    heads = x.reshape(_TOKENS, 2, 32)
    centred = heads - heads.mean(axis=2, keepdims=True)
    deviation = np.sqrt((centred**2).mean(axis=2, keepdims=True) + _EPS)
    normed = (centred / deviation).reshape(_TOKENS, _SIZE) * gain + bias
    return np.asarray(normed, np.float32)


def _turned(x: Floats) -> Floats:
    """Return rows of a query and a key of 32 numbers, each reversed."""
    return x.reshape(_TOKENS, 2, 32)[:, :, ::-1].reshape(_TOKENS, _SIZE)


def _opened(x: Floats, norm: GroupNorm, gain: Floats) -> Floats:
    """Return rows with gates and a norm of groups of 32; the gates are SiLU of the rows."""
    gates = x / (1.0 + np.exp(-x))
    groups = (x * gates if norm == GroupNorm.BEHIND else x).reshape(_TOKENS, 2, 32)
    if norm != GroupNorm.NONE:
        groups = groups / np.sqrt((groups**2).mean(axis=2, keepdims=True) + _EPS)
        groups = groups * gain.reshape(2, 32)
    normed = groups.reshape(_TOKENS, _SIZE)
    return np.asarray(normed if norm == GroupNorm.BEHIND else normed * gates, np.float32)


def _closed(x: Floats) -> Floats:
    """Return rows times their own sigmoids."""
    return np.asarray(x / (1.0 + np.exp(-x)), np.float32)


def _cut(x: Floats) -> Floats:
    """Return rows of 32 gates above their bound, activated and times the ups, then zeros."""
    gates, ups = x[:, :32], x[:, 32:]
    bound = gates.mean(axis=1, keepdims=True) + _SCALE * gates.std(axis=1, keepdims=True)
    above = np.maximum(gates - bound, 0.0)
    opened = above / (1.0 + np.exp(-above)) * ups
    rest = np.zeros(x.size - opened.size, np.float32)
    return np.asarray(np.concatenate((opened.reshape(-1), rest)).reshape(x.shape), np.float32)


def _copied(x: Floats) -> Floats:
    """Return rows of 64 whose second halves are the first rows of 32 in `x`."""
    return np.asarray(np.pad(x.reshape(-1, 32)[:_TOKENS], ((0, 0), (32, 0))), np.float32)


def _own_input(x: Floats, table: Floats, gain: Floats) -> Floats:
    """Return the inputs of two layers of 32; the first token is beyond the table's rows."""
    parts = x.reshape(_TOKENS, 2, 32)
    normed = parts / np.sqrt((parts**2).mean(axis=2, keepdims=True) + _EPS) * gain[:32]
    rows = table[[token if token < _ROWS else 0 for token in _POSITIONS]]
    both = normed.reshape(_TOKENS, _SIZE) + rows * np.float32(_SCALE)
    return np.asarray(both * np.float32(0.5**0.5), np.float32)


def _own_input_fields(table: Any, gain: Floats) -> dict[str, Any]:
    facts = np.zeros((1,), OWN)
    facts["table"], facts["rows"] = address(table), _ROWS
    fields = {"inputs": 32, "weights": address(gain), "eps": _EPS, "scale": _SCALE}
    return {"facts": facts, **fields}


def _opening(norm: GroupNorm, gain: Floats) -> dict[str, Any]:
    facts = np.zeros((1,), OPENING)
    facts["gates"], facts["gate_width"], facts["gate_size"] = Buffer.UNSORTED, _SIZE, 1
    facts["group"], facts["norm"], facts["activation"] = 32, norm, Activation.SILU
    fields = {"inputs": _SIZE, "weights": address(gain), "eps": _EPS, "forms": Form.WIDE}
    # The array is kept alive together with its address; results replace the gates.
    return {"facts": facts, "target": Buffer.UNSORTED, **fields}


def _run(variant: Variant, code: Code, x: Floats, fields: dict[str, Any]) -> Floats:
    """Return the result of one operation on rows, from its own buffer or from UNSORTED."""
    width = 96 if code == Code.REORDER else _SIZE  # a query, a key and a value
    rows, unsorted = (allocate_zeroed((_TOKENS, width), np.float32) for _ in range(2))
    rows[:, :_SIZE] = x
    if code in (Code.OPEN, Code.GATE_NORM):
        unsorted[:] = x  # the gates, or what they open
    buffer = Buffer.QKV if code == Code.REORDER else Buffer.HIDDEN
    given = {"source": buffer, "target": buffer, "width": width}
    given |= {"heads": 1, "kv_heads": 1, "head_dim": 32}
    positions = np.array(_POSITIONS, np.int32)
    step = {"tokens": _TOKENS, "positions": positions, "token_ids": positions}
    buffers = {buffer: rows, Buffer.UNSORTED: unsorted}
    run_alone(RUN_RARE.open(narrowed(variant)), code, buffers, given | fields, step)
    found: Floats = (unsorted if code in _ELSEWHERE else rows)[:, :_SIZE].copy()
    return found
