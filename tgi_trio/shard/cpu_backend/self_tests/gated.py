"""Self-test of the kernels of gated hidden states, at every start that needs them."""

from __future__ import annotations

import numpy as np

from tgi_trio.shard.checkpoint.numbers import Floats
from tgi_trio.shard.cpu_backend.machine_code.entry import RUN_GATED
from tgi_trio.shard.cpu_backend.self_tests.alone import find_difference, run_alone
from tgi_trio.shard.cpu_backend.tables import GATED, OF_GATED, Buffer, Code, Epilogue, Form
from tgi_trio.shard.cpu_backend.variant import Variant, narrowed
from tgi_trio.shard.cpu_backend.weight_layout import PANEL

_TOKENS, _COUNT, _SIZE, _EPS, _SCALE = 3, 3, 64, 1e-5, 0.5
_WANTED = np.array([2, 0], np.int32)
_CHANGED = (Buffer.STREAMS, Buffer.HIDDEN, Buffer.UNSORTED)  # activations go to the last


def find_fault(variant: Variant) -> str | None:
    """Return what is wrong with the kernels of these numbers, or None."""
    draw = np.random.default_rng(17)
    hidden, branch = draw.standard_normal((2, _TOKENS, _SIZE), np.float32)
    streams, gates = draw.standard_normal((2, _TOKENS, _COUNT, _SIZE), np.float32)
    weights = draw.standard_normal((_COUNT, _SIZE), np.float32)
    shares = draw.standard_normal((_TOKENS, PANEL), np.float32)

    factors = np.float32(2.0 * _SCALE) * _sigmoid(shares[:, :_COUNT, None])
    added: Floats = streams + factors * branch[:, None]
    nothing = np.zeros_like(streams)
    repeated = np.repeat(hidden[:, None], _COUNT, axis=1)
    picked = nothing.reshape(-1, _SIZE).copy()
    picked[: len(_WANTED)] = hidden[_WANTED]
    passed = (_sigmoid(gates) * _normed(streams) * weights).mean(axis=1)
    expected = {
        Code.REPEAT: (repeated, hidden, nothing),
        Code.SETTLE: (added, hidden, _normed(added) * weights / _COUNT),
        Code.MIX: (streams, passed, nothing),
        Code.PICK: (streams, hidden, picked.reshape(streams.shape)),
    }
    facts = np.zeros((1,), GATED)
    facts["count"], facts["adds"] = _COUNT, 1
    operation = {"width": _SIZE, "facts": facts, "weights": weights, "eps": _EPS, "scale": _SCALE}
    operation |= {"target": Buffer.HIDDEN, "epilogue": Epilogue.STORE, "forms": Form.WIDE}
    step = {"tokens": _TOKENS, "wanted": len(_WANTED), "wanted_ids": _WANTED}
    kernel = RUN_GATED.open(narrowed(variant))
    for code in OF_GATED:
        rows = {Buffer.HIDDEN: hidden.copy(), Buffer.STREAMS: streams.copy(), Buffer.BRANCH: branch}
        rows |= {Buffer.SHARES: shares.copy(), Buffer.PROJECTED: gates}
        rows[Buffer.UNSORTED] = np.zeros_like(streams)
        own = operation | {"wanted_only": code == Code.PICK}
        run_alone(kernel, code, rows, own, step)
        if fault := find_difference(code, rows, zip(_CHANGED, expected[code], strict=True)):
            return fault
    return None


def _sigmoid(x: Floats) -> Floats:
    one = np.float32(1.0)
    found: Floats = one / (one + np.exp(-x))
    return found


def _normed(x: Floats) -> Floats:
    found: Floats = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + _EPS)
    return found
