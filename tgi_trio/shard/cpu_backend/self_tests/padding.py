"""Self-test of the kernels of padded heads, at every start of a model with such heads."""

from __future__ import annotations

import numpy as np

from tgi_trio.shard.checkpoint.numbers import Floats
from tgi_trio.shard.cpu_backend.arena import allocate_zeroed
from tgi_trio.shard.cpu_backend.machine_code.entry import RUN_PADDING
from tgi_trio.shard.cpu_backend.self_tests.alone import run_alone
from tgi_trio.shard.cpu_backend.tables import PADDING, Buffer, Code, Form
from tgi_trio.shard.cpu_backend.variant import Variant, narrowed

_TOKENS, _HEADS, _KV_HEADS = 3, 4, 2
_DIM, _VALUE, _KEPT, _KEPT_VALUE = 40, 24, 64, 32


def find_fault(variant: Variant) -> str | None:
    """Return what is wrong with the kernels of these numbers, or None."""
    draw, heads = np.random.default_rng(13), _HEADS + _KV_HEADS
    keys = draw.standard_normal((_TOKENS, heads, _DIM), np.float32)
    values = draw.standard_normal((_TOKENS, _KV_HEADS, _VALUE), np.float32)
    order = np.full(_KEPT, -1, np.int32)
    order[:20], order[32:52] = np.arange(0, _DIM, 2), np.arange(1, _DIM, 2)
    turned = np.where(order < 0, np.float32(0.0), keys[:, :, order])
    kept_values = np.pad(values, ((0, 0), (0, 0), (0, _KEPT_VALUE - _VALUE)))
    width = heads * _KEPT + _KV_HEADS * _KEPT_VALUE
    facts = np.zeros((1,), PADDING)
    facts["dim"], facts["value_dim"] = _DIM, _VALUE
    facts["queries"], facts["values"] = heads, _KV_HEADS
    for own, expected in ((order, turned), (None, np.pad(keys, ((0, 0), (0, 0), (0, 24))))):
        rows = allocate_zeroed((_TOKENS, width), np.float32)
        narrow = np.concatenate((_flat(keys), _flat(values)), axis=1)
        rows[:, : narrow.shape[1]] = narrow
        _run(variant, Code.PAD, {Buffer.QKV: rows}, facts, own, width)
        error = np.abs(rows - np.concatenate((_flat(expected), _flat(kept_values)), axis=1)).max()
        if error != 0:
            return f"PAD is {error:.2g} away from the reference"
    said = draw.standard_normal((_TOKENS, _HEADS, _KEPT_VALUE), np.float32)
    closed = allocate_zeroed((_TOKENS, _HEADS * _VALUE), np.float32)
    expected = _flat(said[:, :, :_VALUE].copy())
    buffers = {Buffer.ATTENDED: said, Buffer.MIXED: closed}
    _run(variant, Code.CLOSE, buffers, facts, None, _HEADS * _VALUE)
    error = np.abs(closed - expected).max()
    return None if error == 0 else f"CLOSE is {error:.2g} away from the reference"


def _flat(heads: Floats) -> Floats:
    return heads.reshape(len(heads), -1)


def _run(
    variant: Variant,
    code: Code,
    buffers: dict[Buffer, Floats],
    facts: np.ndarray,
    order: np.ndarray | None,
    width: int,
) -> None:
    """Run an operation on rows in buffers, of which the last is the target."""
    fields = {"facts": facts, "width": width, "forms": Form.WIDE, "heads": _HEADS}
    fields |= {"source": Buffer.ATTENDED, "target": next(reversed(buffers))}
    fields |= {"head_dim": _KEPT, "value_dim": _KEPT_VALUE, "order": 0 if order is None else order}
    run_alone(RUN_PADDING.open(narrowed(variant)), code, buffers, fields, {"tokens": _TOKENS})
