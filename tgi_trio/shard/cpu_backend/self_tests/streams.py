"""Self-test of the kernels of several hidden states per token, at every start that needs them."""

from __future__ import annotations

import numpy as np

from tgi_trio.shard.checkpoint.numbers import Floats
from tgi_trio.shard.cpu_backend.arena import address, allocate_zeroed
from tgi_trio.shard.cpu_backend.machine_code.entry import RUN_STREAMS
from tgi_trio.shard.cpu_backend.tables import OPERATION, STEP, STREAM, STREAMING, Buffer, Code
from tgi_trio.shard.cpu_backend.variant import Variant, narrowed
from tgi_trio.shard.cpu_backend.weight_layout import PANEL

_TOKENS, _COUNT, _ACTIVE, _SIZE = 3, 3, 1, 64


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
    for code in STREAMING:
        given = {
            Buffer.HIDDEN: hidden.copy(),
            Buffer.STREAMS: streams.copy(),
            Buffer.ROUTED: routes.copy(),
            Buffer.BRANCH: branch,
        }
        _run(variant, code, facts, given)
        found = given[Buffer.STREAMS], given[Buffer.HIDDEN]
        pairs = zip(found, expected[code], strict=True)
        error = max(float(np.abs(own - other).max()) for own, other in pairs)
        if not error < 1e-4:
            return f"{code.name} is {error:.2g} away from the reference"
    return None


def _as_large(streams: Floats, like: Floats) -> Floats:
    """Return streams scaled to the mean squares of `like`."""
    wanted = (like**2).mean(axis=-1)[:, None, None]
    grown: Floats = streams * np.sqrt(wanted / (streams**2).mean(axis=-1, keepdims=True))
    return grown


def _run(variant: Variant, code: Code, facts: np.ndarray, given: dict[Buffer, Floats]) -> None:
    """Run one operation on two threads, one after the other."""
    step, op = np.zeros((1,), STEP), np.zeros((1,), OPERATION)
    scratch = allocate_zeroed((4096,))
    step["tokens"], step["threads"] = _TOKENS, 2
    for buffer, rows in given.items():
        step["buffers"][0, buffer] = address(rows)
    op["code"], op["width"], op["facts"] = code, _SIZE, address(facts)
    for rank in range(2):
        RUN_STREAMS.open(narrowed(variant))(rank, address(step), address(op), 0, address(scratch))
