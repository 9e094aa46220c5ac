"""Drafts of Medusa heads, which all predict from the same hidden state, one token further each.

They make one chain of each head's best token, not a tree: on a CPU, every row beyond a tile has its
full cost, and verification takes chains. "Medusa" (Cai and others 2024, arXiv 2401.10774).
"""

from __future__ import annotations

from tgi_trio.model.speculators.spec import MedusaSpec
from tgi_trio.shard.speculation.arithmetic import MODEL_HEAD, Arithmetic, Ids, Rows


def draft_by_medusa(
    spec: MedusaSpec, a: Arithmetic, hidden: Rows, tokens: Ids, count: int
) -> list[Ids]:
    """Return `count` drafts [n] after `tokens` [n], which `hidden` [n, features] chose."""
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
        every = a.best(a.multiply(MODEL_HEAD, a.concatenate(states)))
        return [every[i * rows : (i + 1) * rows] for i in range(count)]
    return [a.best(a.multiply(f"head {i}", state)) for i, state in enumerate(states)]
