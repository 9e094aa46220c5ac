"""Guesses of Medusa heads: each looks one token further, from the same hidden state.

One chain of each head's best token (no tree): on a CPU rows beyond a tile cost fully, and a chain
is what `verify` takes. "Medusa" (Cai and others 2024, arXiv 2401.10774).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tgi_trio.model.speculators.spec import MedusaSpec
from tgi_trio.shard.speculation.arithmetic import MODEL_HEAD, Arithmetic, Rows


def guess_medusa(
    spec: MedusaSpec, a: Arithmetic, hidden: Rows, tokens: NDArray[np.int64], count: int
) -> NDArray[np.int64]:
    """Return int64 [n, count] guesses behind `tokens` [n]; `hidden` [n, features] chose those."""
    x = a.normalise(hidden)
    rows, size = x.shape
    first = a.silu(a.multiply("first", x))
    states = []
    for i in range(count):
        state = x + first[:, i * size : (i + 1) * size]
        for j in range(1, spec.layers):
            state = state + a.silu(a.multiply(f"{i}.{j}", state))
        states.append(state)
    if spec.shares_head:
        logits = a.multiply(MODEL_HEAD, a.concatenate(states))
        return a.best(logits).reshape(count, rows).T
    best = [a.best(a.multiply(f"head {i}", state)) for i, state in enumerate(states)]
    return np.stack(best, axis=1)
