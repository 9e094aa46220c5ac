"""Mamba's selective scan (Gu, Dao 2023): a decay per channel and number of its state.

A channel's state s [state_dim] gets s <- exp(dt A) s + dt x b, and says s . c; b and c are one for
all channels.
"""

from __future__ import annotations

from typing import Final

import torch

from tgi_trio.shard.torch_backend.states.scan import Parts, scan_rows
from tgi_trio.shard.torch_backend.states.steps import StateSteps

_CHUNK: Final = 64


def scan_mamba1(
    x: torch.Tensor,
    dt: torch.Tensor,
    rate: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    states: torch.Tensor,
    steps: StateSteps,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs [T, channels] and the states behind the rows, all in float32.

    `x`, `dt` [T, channels]; `rate` A [channels, state_dim], negative; `b`, `c` [T, state_dim];
    `states` [R, channels, state_dim].
    """

    def step(parts: Parts, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, dt, b, c = parts
        states = states * (dt[..., None] * rate).exp_()
        states.baddbmm_(x[..., None], b[:, None])
        return torch.bmm(states, c[..., None]).squeeze(-1), states

    def chunk(
        parts: Parts, there: torch.Tensor, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, dt = (part.masked_fill(~there[..., None], 0) for part in parts[:2])
        outputs = torch.empty_like(x)
        for i in range(x.shape[1]):
            own = (x[:, i], dt[:, i], *(part[:, i] for part in parts[2:]))
            outputs[:, i], states = step(own, states)
        return outputs, states

    return scan_rows((x * dt, dt, b, c), states, steps, step, chunk, _CHUNK)
