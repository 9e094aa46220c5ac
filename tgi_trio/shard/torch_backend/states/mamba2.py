"""Mamba-2's scan (Dao, Gu 2024): a decay per head.

A head's state S [head_dim, state_dim] becomes S <- exp(dt A) S + dt x b^T, and the output is S c.
The heads of a group share b and c.
"""

from __future__ import annotations

from typing import Final

import torch

from tgi_trio.shard.torch_backend.states.scan import Parts, scan_rows
from tgi_trio.shard.torch_backend.states.steps import StateSteps

_CHUNK: Final = 64


def scan_mamba2(
    x: torch.Tensor,
    dt: torch.Tensor,
    rate: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    states: torch.Tensor,
    steps: StateSteps,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs [T, heads, head_dim] and the states after the rows, all in float32.

    `x` [T, heads, head_dim]; `dt` [T, heads], at least 0; `rate` A [heads], negative; `b`, `c` [T,
    groups, state_dim]; `states` [R, heads, head_dim, state_dim].
    """
    parts = (x * dt[..., None], dt * rate, b, c)
    return scan_rows(parts, states, steps, _step, _chunk, _CHUNK)


def _step(parts: Parts, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, decay, b, c = parts
    rows, heads, head_dim = x.shape
    each = heads // b.shape[1]
    states = states * decay.exp()[..., None, None]
    b, c = (part.repeat_interleave(each, 1).flatten(0, 1) for part in (b, c))
    flat = states.view(rows * heads, head_dim, -1)
    flat.baddbmm_(x.view(rows * heads, head_dim, 1), b[:, None])
    return torch.bmm(flat, c[..., None]).view_as(x), states


def _chunk(
    parts: Parts, there: torch.Tensor, states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    x, decay, b, c = (part.transpose(1, 2) for part in parts)  # [R, heads or groups, L, ...]
    there = there[:, None]
    total = decay.masked_fill(~there, 0).cumsum(-1)
    x = x.masked_fill(~there[..., None], 0)
    size, each = there.shape[2], x.shape[1] // b.shape[1]
    future = torch.ones(size, size, dtype=torch.bool, device=x.device).triu(1)
    between = (total[..., None] - total[:, :, None]).masked_fill_(future, -torch.inf).exp_()
    likeness = (c @ b.transpose(-1, -2)).repeat_interleave(each, 1) * between
    b, c = (part.repeat_interleave(each, 1) for part in (b, c))
    outputs = likeness @ x + (c * total.exp()[..., None]) @ states.transpose(-1, -2)
    left = (total[..., -1:] - total).exp()[..., None]
    states = states * total[..., -1].exp()[..., None, None] + (x * left).transpose(-1, -2) @ b
    return outputs.transpose(1, 2), states
