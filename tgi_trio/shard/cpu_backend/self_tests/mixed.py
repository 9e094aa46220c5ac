"""Self-test of the kernels of hidden states that are mixed, at every start that needs them."""

from __future__ import annotations

import numpy as np

from tgi_trio.shard.checkpoint.numbers import Floats
from tgi_trio.shard.cpu_backend.arena import address, allocate_zeroed
from tgi_trio.shard.cpu_backend.machine_code.entry import RUN_MIXED
from tgi_trio.shard.cpu_backend.tables import HYPER, OF_MIXED, OPERATION, STEP, Buffer, Code
from tgi_trio.shard.cpu_backend.variant import Variant, narrowed
from tgi_trio.shard.cpu_backend.weight_layout import PANEL

_TOKENS, _COUNT, _SIZE, _EPS = 3, 3, 64, 1e-5
_WEIGHTS, _ITERATIONS = _COUNT * (2 + _COUNT), 3
_READ_EPS, _ADDED, _SCALE = 0.01, 2.0, 0.5


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
    for code in OF_MIXED:
        rows = {Buffer.HIDDEN: hidden.copy(), Buffer.STREAMS: streams.copy()}
        rows |= {Buffer.SHARES: given.copy(), Buffer.BRANCH: branch}
        _run(variant, code, facts, rows)
        found = (rows[buffer] for buffer in (Buffer.HIDDEN, Buffer.STREAMS, Buffer.SHARES))
        pairs = zip(found, expected[code], strict=True)
        error = max(float(np.abs(own - other).max()) for own, other in pairs)
        if not error < 1e-4:
            return f"{code.name} is {error:.2g} away from the reference"
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


def _run(variant: Variant, code: Code, facts: np.ndarray, given: dict[Buffer, Floats]) -> None:
    """Run one operation on two threads, one after the other."""
    step, op = np.zeros((1,), STEP), np.zeros((1,), OPERATION)
    scratch = allocate_zeroed((4096,))
    step["tokens"], step["threads"] = _TOKENS, 2
    for buffer, rows in given.items():
        step["buffers"][0, buffer] = address(rows)
    op["code"], op["width"], op["facts"] = code, _SIZE, address(facts)
    op["eps"], op["scale"] = _EPS, _SCALE
    for rank in range(2):
        RUN_MIXED.open(narrowed(variant))(rank, address(step), address(op), 0, address(scratch))
