"""Self-test of the kernels of several hidden states per token, at every start that needs them."""

from __future__ import annotations

import numpy as np

from tgi_trio.shard.checkpoint.numbers import Floats
from tgi_trio.shard.cpu_backend.arena import address
from tgi_trio.shard.cpu_backend.machine_code.entry import RUN_STREAMS
from tgi_trio.shard.cpu_backend.self_tests.alone import find_difference, run_alone
from tgi_trio.shard.cpu_backend.tables import STREAM, STREAMING, Buffer, Code
from tgi_trio.shard.cpu_backend.variant import Variant, narrowed
from tgi_trio.shard.cpu_backend.weight_layout import PANEL

_TOKENS, _COUNT, _ACTIVE, _SIZE = 3, 3, 1, 64
_CHANGED = (Buffer.STREAMS, Buffer.HIDDEN)


def find_fault(variant: Variant) -> str | None:
    """Return what is wrong with the kernels of these numbers, or None."""
    draw = np.random.default_rng(11)
    hidden, branch = draw.standard_normal((2, _TOKENS, _SIZE), np.float32)
    streams = draw.standard_normal((_TOKENS, _COUNT, _SIZE), np.float32)
    routes = draw.standard_normal((_TOKENS, PANEL), np.float32)
    coefficients = draw.standard_normal((_COUNT * _COUNT, _COUNT), np.float32)
    scale = draw.standard_normal(_SIZE, np.float32)
    said = np.tanh(routes[:, :_COUNT])
    weights = (said @ coefficients.T).reshape(_TOKENS, _COUNT, _COUNT)
    missed = hidden - streams[:, _ACTIVE]
    corrected = streams + (said @ coefficients[:_COUNT].T + 1.0)[:, :, None] * missed[:, None]
    large = _as_large(streams, hidden)
    large[:, 0] = hidden
    alike = _as_large(streams, streams[:, 0])
    expected = {
        Code.SPLIT: (large, large[:, _ACTIVE]),
        Code.PREDICT: (predicted := streams + weights @ streams, predicted[:, _ACTIVE]),
        Code.CORRECT: (corrected, corrected[:, _ACTIVE] * scale),
        Code.SPREAD: (
            spread := streams + branch[:, None] * np.array([0, 1, 1])[:, None],
            spread[:, _ACTIVE],
        ),
        Code.MERGE: (streams, alike.mean(axis=1)),
    }
    facts = np.zeros((1,), STREAM)
    facts["count"], facts["active"] = _COUNT, _ACTIVE
    facts["coefficients"], facts["scale"] = address(coefficients), address(scale)
    kernel = RUN_STREAMS.open(narrowed(variant))
    for code in STREAMING:
        given = {
            Buffer.HIDDEN: hidden.copy(),
            Buffer.STREAMS: streams.copy(),
            Buffer.ROUTED: routes.copy(),
            Buffer.BRANCH: branch,
        }
        run_alone(kernel, code, given, {"width": _SIZE, "facts": facts}, {"tokens": _TOKENS})
        if fault := find_difference(code, given, zip(_CHANGED, expected[code], strict=True)):
            return fault
    return None


def _as_large(streams: Floats, like: Floats) -> Floats:
    """Return streams scaled to the mean squares of `like`."""
    wanted = (like**2).mean(axis=-1)[:, None, None]
    grown: Floats = streams * np.sqrt(wanted / (streams**2).mean(axis=-1, keepdims=True))
    return grown
