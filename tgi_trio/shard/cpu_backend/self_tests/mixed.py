"""Self-test of the kernels of hidden states that are mixed, at every start that needs them."""

from __future__ import annotations

import numpy as np

from tgi_trio.shard.checkpoint.numbers import Floats
from tgi_trio.shard.cpu_backend.arena import address
from tgi_trio.shard.cpu_backend.machine_code.entry import RUN_MIXED
from tgi_trio.shard.cpu_backend.self_tests.alone import find_difference, run_alone
from tgi_trio.shard.cpu_backend.tables import HYPER, OF_MIXED, Buffer, Code
from tgi_trio.shard.cpu_backend.variant import Variant, narrowed
from tgi_trio.shard.cpu_backend.weight_layout import PANEL

_TOKENS, _COUNT, _SIZE, _EPS = 3, 3, 64, 1e-5
_WEIGHTS, _ITERATIONS = _COUNT * (2 + _COUNT), 3
_READ_EPS, _ADDED, _SCALE = 0.01, 2.0, 0.5
_CHANGED = (Buffer.HIDDEN, Buffer.STREAMS, Buffer.SHARES)


def find_fault(variant: Variant) -> str | None:
    """Return what is wrong with the kernels of these numbers, or None."""
    draw = np.random.default_rng(19)
    hidden, branch = draw.standard_normal((2, _TOKENS, _SIZE), np.float32)
    streams = draw.standard_normal((_TOKENS, _COUNT, _SIZE), np.float32)
    mix = draw.standard_normal((_WEIGHTS, _COUNT * _SIZE), np.float32) * np.float32(0.1)
    bases = draw.standard_normal(_WEIGHTS, np.float32)
    scales = np.array([0.7, -1.2, 0.9], np.float32)
    given = draw.standard_normal((_TOKENS, PANEL), np.float32)

    flat = streams.reshape(_TOKENS, -1)
    flat = flat / np.sqrt((flat**2).mean(axis=1, keepdims=True) + _EPS)
    raw = flat @ mix.T * np.repeat(scales, (_COUNT, _COUNT, _COUNT**2)) + bases
    after = given.copy()
    weights = 1.0 / (1.0 + np.exp(-raw[:, : 2 * _COUNT]))
    after[:, :_COUNT] = weights[:, :_COUNT] + _READ_EPS
    after[:, _COUNT : 2 * _COUNT] = _ADDED * weights[:, _COUNT:]
    after[:, 2 * _COUNT : _WEIGHTS] = _balance(raw[:, 2 * _COUNT :])
    shares = given[:, _COUNT : 2 * _COUNT, None] * np.float32(_SCALE)
    mixture = given[:, 2 * _COUNT : _WEIGHTS].reshape(_TOKENS, _COUNT, _COUNT)
    scattered = np.einsum("tab,tad->tbd", mixture, streams) + shares * branch[:, None]
    expected = {
        Code.FORK_MIXED: (hidden, np.repeat(hidden[:, None], _COUNT, axis=1), given),
        Code.GATHER_MIXED: (
            np.einsum("tk,tkd->td", after[:, :_COUNT], streams),
            streams,
            after,
        ),
        Code.SCATTER_MIXED: (hidden, scattered, given),
        Code.JOIN_MIXED: (streams.mean(axis=1), streams, given),
    }
    facts = np.zeros((1,), HYPER)
    facts["count"], facts["weights"], facts["iterations"] = _COUNT, _WEIGHTS, _ITERATIONS
    facts["mix"], facts["bases"], facts["scales"] = map(address, (mix, bases, scales))
    facts["read"], facts["read_eps"], facts["added"] = 1.0, _READ_EPS, _ADDED
    kernel = RUN_MIXED.open(narrowed(variant))
    operation = {"width": _SIZE, "facts": facts, "eps": _EPS, "scale": _SCALE}
    for code in OF_MIXED:
        rows = {Buffer.HIDDEN: hidden.copy(), Buffer.STREAMS: streams.copy()}
        rows |= {Buffer.SHARES: given.copy(), Buffer.BRANCH: branch}
        run_alone(kernel, code, rows, operation, {"tokens": _TOKENS})
        if fault := find_difference(code, rows, zip(_CHANGED, expected[code], strict=True)):
            return fault
    return None


def _balance(raw: Floats) -> Floats:
    """Return weights [T, count * count] whose rows and columns add up to one (Sinkhorn)."""
    weights = np.exp(raw.reshape(_TOKENS, _COUNT, _COUNT))
    weights = weights / weights.sum(axis=2, keepdims=True) + _READ_EPS
    weights /= weights.sum(axis=1, keepdims=True) + _READ_EPS
    for _ in range(_ITERATIONS - 1):
        weights /= weights.sum(axis=2, keepdims=True) + _READ_EPS
        weights /= weights.sum(axis=1, keepdims=True) + _READ_EPS
    found: Floats = weights.reshape(_TOKENS, -1)
    return found
