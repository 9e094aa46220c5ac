"""The gated delta rule (Yang, Kautz, Hatamizadeh 2024), also with a decay per channel (Kimi Linear,
Moonshot AI 2025).

A head's state S [key_dim, value_dim] maps keys to values. A token decays it, then corrects the
value that it returns for the token's key:

    S <- decay * S;  S <- S + k (beta (v - k S));  output = q S

The corrections in a chunk of tokens depend on each other; they are the solution of one triangular
system. Exponents of decays are never positive, so nothing overflows however much a head forgets.
"""

from __future__ import annotations

from typing import Final

import torch

from tgi_trio.shard.torch_backend.states.scan import Parts, scan_rows
from tgi_trio.shard.torch_backend.states.steps import StateSteps

_CHUNK: Final = 64
_CHANNEL_CHUNK: Final = 16  # with a decay per channel, each pair of tokens has key_dim numbers


def apply_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    steps: StateSteps,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs [T, heads, value_dim] and the states after the rows, all in float32.

    `query`, `key` [T, heads, key_dim]; `value` [T, heads, value_dim]; `decay`: its logarithm, at
    most 0, [T, heads, 1] or [T, heads, key_dim]; `beta` [T, heads]; `states` [R, heads, key_dim,
    value_dim].
    """
    size = _CHUNK if decay.shape[-1] == 1 else _CHANNEL_CHUNK
    parts = (query, key, value, decay, beta[..., None])
    return scan_rows(parts, states, steps, _step, _chunk, size)


def normalise(x: torch.Tensor) -> torch.Tensor:
    """Return `x` [..., dim] as unit vectors; those near zero stay near zero."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _step(parts: Parts, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    query, key, value, decay, beta = parts
    decay = decay.exp()
    # Both reads of the state at once: for the key, and for the query before the update.
    known, seen = (torch.stack((key, query), -2) * decay[..., None, :] @ states).unbind(-2)
    update = beta * (value - known)
    outputs = seen + (query * key).sum(-1, keepdim=True) * update
    states = states * decay[..., None]
    states.view(-1, *states.shape[-2:]).baddbmm_(
        key.flatten(0, 1)[..., None], update.flatten(0, 1)[:, None]
    )
    return outputs, states


def _chunk(
    parts: Parts, there: torch.Tensor, states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    query, key, value, decay, beta = (part.transpose(1, 2) for part in parts)  # [R, heads, L, ...]
    there = there[:, None, :, None]
    total = decay.masked_fill(~there, 0).cumsum(2)
    beta = beta.masked_fill(~there, 0)
    since = total.exp()
    size = there.shape[2]
    future = torch.ones(size, size, dtype=torch.bool, device=key.device).triu(1)
    between = (total[:, :, :, None] - total[:, :, None]).masked_fill_(future[..., None], -torch.inf)
    if decay.shape[-1] == 1:
        between = between.squeeze(-1).exp_()
        by_key = (key @ key.transpose(-1, -2)) * between
        by_query = (query @ key.transpose(-1, -2)) * between
    else:
        keys = between.exp_() * key[:, :, None]  # [R, heads, queries, keys, key_dim]
        by_key = (keys @ key[..., None]).squeeze(-1)
        by_query = (keys @ query[..., None]).squeeze(-1)
    wanted = beta * (value - (key * since) @ states)
    update = torch.linalg.solve_triangular(beta * by_key, wanted, upper=False, unitriangular=True)
    outputs = (query * since) @ states + by_query @ update
    left = (total[:, :, -1:] - total).exp()
    states = states * since[:, :, -1, :, None] + (key * left).transpose(-1, -2) @ update
    return outputs.transpose(1, 2), states
