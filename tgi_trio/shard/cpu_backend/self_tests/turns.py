"""Self-test of the kernels of EXL3's turns, at every start of a model with such matrices."""

from __future__ import annotations

from typing import Any

import numpy as np

from tgi_trio.model.quantised.exl3_layout import TURNED
from tgi_trio.shard.checkpoint.formats.exl3 import RING, turn
from tgi_trio.shard.checkpoint.numbers import Floats
from tgi_trio.shard.cpu_backend.machine_code.entry import RUN_TURNS
from tgi_trio.shard.cpu_backend.self_tests.alone import run_alone
from tgi_trio.shard.cpu_backend.tables import Activation, Buffer, Code, Epilogue, Form
from tgi_trio.shard.cpu_backend.variant import Variant, narrowed
from tgi_trio.shard.cpu_backend.weight_layout import PANEL

_TOKENS, _FEATURES = 3, 3 * TURNED
_TOLERANCE = 1e-5


def find_fault(variant: Variant) -> str | None:
    """Return what is wrong with the kernels of these numbers, or None."""
    draw = np.random.default_rng(17)
    x, gates, old = draw.standard_normal((3, _TOKENS, _FEATURES), np.float32)
    scales, bias = draw.uniform(0.5, 1.5, (2, _FEATURES)).astype(np.float32)
    found = run_turns(variant, Code.TURN_IN, {Buffer.FLOATS: x}, Epilogue.STORE, scales)
    ordered = turn_rows(x * scales).reshape(_TOKENS, -1, len(RING))[..., RING]
    faults = {"TURN_IN": distance(found, ordered.reshape(x.shape))}
    turned = turn_rows(x)
    exact = {
        Epilogue.STORE: turned * scales + bias,
        Epilogue.ADD: old + turned * scales + bias,
        Epilogue.ACTIVATE: np.maximum(turned * scales + bias, 0),
        Epilogue.GATE: np.maximum(gates * scales, 0) * (turned * bias),
    }
    for epilogue, expected in exact.items():
        buffers, own, more = {Buffer.RAW: x, Buffer.GATES: gates, Buffer.INNER: old}, scales, bias
        if epilogue == Epilogue.GATE:
            halves = (each.reshape(-1, PANEL // 2) for each in (scales, bias))
            own, more = np.stack(list(halves), axis=1).reshape(-1), np.zeros(2 * _FEATURES)
        found = run_turns(variant, Code.TURN_OUT, buffers, epilogue, own, more.astype(np.float32))
        faults[f"TURN_OUT ({epilogue.name})"] = distance(found, expected)
    return next((f"{name} is {far:.2g} away" for name, far in faults.items() if far), None)


def turn_rows(rows: Floats) -> Floats:
    """Return every 128 numbers of rows, turned."""
    columns = np.ascontiguousarray(rows.reshape(-1, TURNED).T, np.float64)
    return turn(columns).T.reshape(rows.shape).astype(np.float32)


def distance(found: Floats, expected: Floats) -> float:
    """Return the largest distance for its size; 0: as small as sums of float32 have."""
    far = float(np.abs(found - expected).max() / np.abs(expected).max())
    return 0.0 if far < _TOLERANCE else far or 1.0


def run_turns(
    variant: Variant,
    code: Code,
    given: dict[Buffer, Floats],
    epilogue: Epilogue,
    scales: Floats,
    bias: Floats | None = None,
) -> Floats:
    """Return the target of an operation.

    `given`: the rows of buffers, the first the source and the last the target.
    """
    buffers = {buffer: rows.copy() for buffer, rows in given.items()}
    source = next(iter(buffers)) if code == Code.TURN_OUT else Buffer.UNSORTED
    if code == Code.TURN_IN:
        buffers = {Buffer.UNSORTED: given[Buffer.FLOATS].copy()} | buffers
    fields: dict[str, Any] = {
        "epilogue": epilogue,
        "source": source,
        "target": Buffer.INNER,
        "scale": 1.0,
    }
    fields |= {"forms": Form.WIDE, "activation": Activation.RELU}
    fields |= dict.fromkeys(("inputs", "outputs", "width"), _FEATURES)
    fields |= {"scales": scales, "bias": 0 if bias is None else bias}
    run_alone(RUN_TURNS.open(narrowed(variant)), code, buffers, fields, {"tokens": _TOKENS})
    return next(reversed(buffers.values()))
