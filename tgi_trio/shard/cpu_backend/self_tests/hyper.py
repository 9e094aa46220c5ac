"""Self-test of the kernels between several hidden states, at every start that needs them."""

from __future__ import annotations

import numpy as np

from tgi_trio.shard.cpu_backend.arena import address
from tgi_trio.shard.cpu_backend.machine_code.entry import RUN_HYPER
from tgi_trio.shard.cpu_backend.self_tests.alone import find_difference, run_alone
from tgi_trio.shard.cpu_backend.tables import HYPER, OF_HYPER, Buffer, Code
from tgi_trio.shard.cpu_backend.variant import Variant, narrowed
from tgi_trio.shard.cpu_backend.weight_layout import PANEL

_TOKENS, _COUNT, _SIZE, _EPS = 3, 3, 64, 1e-5
_READ_EPS, _ADDED, _ADDED_EPS, _SCALE = 0.01, 1.5, 0.02, 0.5
_CHANGED = (Buffer.HIDDEN, Buffer.STREAMS, Buffer.SHARES)


def find_fault(variant: Variant) -> str | None:
    """Return what is wrong with the kernels of these numbers, or None."""
    draw = np.random.default_rng(13)
    hidden, branch = draw.standard_normal((2, _TOKENS, _SIZE), np.float32)
    streams = draw.standard_normal((_TOKENS, _COUNT, _SIZE), np.float32)
    mix = draw.standard_normal((2 * _COUNT, _COUNT * _SIZE), np.float32) * np.float32(0.1)
    bases = draw.standard_normal(2 * _COUNT, np.float32)
    scales = np.array([0.7, -1.2], np.float32)
    given = draw.standard_normal((_TOKENS, PANEL), np.float32)

    flat = streams.reshape(_TOKENS, -1)
    flat = flat / np.sqrt((flat**2).mean(axis=1, keepdims=True) + _EPS)
    weights = 1.0 / (1.0 + np.exp(-(flat @ mix.T * np.repeat(scales, _COUNT) + bases)))
    weights = weights * np.repeat((1.0, _ADDED), _COUNT) + np.repeat(
        (_READ_EPS, _ADDED_EPS), _COUNT
    )
    after = given.copy()
    after[:, : 2 * _COUNT] = weights
    added = given[:, _COUNT : 2 * _COUNT, None] * _SCALE * branch[:, None]
    expected = {
        Code.FORK: (hidden, np.repeat(hidden[:, None], _COUNT, axis=1), given),
        Code.GATHER: (np.einsum("tk,tkd->td", weights[:, :_COUNT], streams), streams, after),
        Code.SCATTER: (hidden, streams + added, given),
    }
    facts = np.zeros((1,), HYPER)
    facts["count"], facts["weights"] = _COUNT, 2 * _COUNT
    facts["mix"], facts["bases"], facts["scales"] = map(address, (mix, bases, scales))
    facts["read"], facts["read_eps"] = 1.0, _READ_EPS
    facts["added"], facts["added_eps"] = _ADDED, _ADDED_EPS
    kernel = RUN_HYPER.open(narrowed(variant))
    operation = {"width": _SIZE, "facts": facts, "eps": _EPS, "scale": _SCALE}
    for code in OF_HYPER:
        rows = {Buffer.HIDDEN: hidden.copy(), Buffer.STREAMS: streams.copy()}
        rows |= {Buffer.SHARES: given.copy(), Buffer.BRANCH: branch}
        run_alone(kernel, code, rows, operation, {"tokens": _TOKENS})
        if fault := find_difference(code, rows, zip(_CHANGED, expected[code], strict=True)):
            return fault
    return None
