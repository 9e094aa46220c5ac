"""Drafts of an MLP speculator: each from the previous state and the previous token.

"Accelerating production LLMs with combined token/embedding speculators" (Wertheimer and others
2024, arXiv 2404.19124). The first token is the one that was chosen, sampled or not.
"""

from __future__ import annotations

import math

from tgi_trio.model.speculators.spec import MlpSpec
from tgi_trio.shard.speculation.arithmetic import Arithmetic, Ids, Rows


def draft_by_mlp(spec: MlpSpec, a: Arithmetic, hidden: Rows, tokens: Ids, count: int) -> list[Ids]:
    """Return `count` drafts [n] after `tokens` [n], which `hidden` [n, features] chose."""
    kept = 0.5 ** (0.5 / spec.heads)
    fresh = math.sqrt((1 - kept**2) * (spec.inner / 2))
    state = a.normalise(hidden)
    if spec.scales_input:
        state = state * a.inverse_rms(state) * math.sqrt(0.5)
    drafts = []
    for i in range(count):
        own = 0 if spec.tied else i
        projection = min(i, 1) if spec.tied else i
        mixed = a.multiply(f"proj {projection}", state) * kept
        mixed = mixed + a.look_up(f"emb {own}", tokens) * fresh
        normed = mixed * a.inverse_rms(mixed) * a.vector(f"gain {own}") + a.vector(f"bias {own}")
        state = a.gelu(normed)
        tokens = a.best(a.multiply(f"head {own}", state))
        drafts.append(tokens)
    return drafts
