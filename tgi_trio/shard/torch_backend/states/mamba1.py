"""Mamba's selective scan (Gu, Dao 2023): a decay for each number of each channel's state.

A channel's state s [state_dim] becomes s <- exp(dt A) s + dt x b, and the output is s . c; all
channels share b and c. Channels are the last dimension, so that sums over a state add up whole rows
of channels.
"""

from __future__ import annotations

from typing import Final

import torch

from tgi_trio.shard.torch_backend.states.scan import Parts, scan_rows
from tgi_trio.shard.torch_backend.states.steps import StateSteps

_CHUNK: Final = 64  # tokens
_ROOM: Final = 1 << 18  # numbers of states that a CPU computes at a time, to stay in its cache


def scan_mamba1(
    x: torch.Tensor,
    dt: torch.Tensor,
    rate: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    states: torch.Tensor,
    steps: StateSteps,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs [T, channels] and the states after the rows, all in float32.

    `x`, `dt` [T, channels]; `rate` A [state_dim, channels], negative; `b`, `c` [T, state_dim];
    `states` [R, state_dim, channels].
    """

    def step(parts: Parts, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, dt, b, c = parts
        states = states * (dt[:, None] * rate).exp_()
        states.addcmul_(x[:, None], b[..., None])
        return torch.bmm(c[:, None], states).squeeze(1), states

    def chunk(
        parts: Parts, there: torch.Tensor, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, dt = (part.masked_fill(~there[..., None], 0).transpose(0, 1) for part in parts[:2])
        b, c = (part.transpose(0, 1) for part in parts[2:])  # [L, R, ...]
        outputs = torch.empty_like(x)
        at_once = max(1, _ROOM // states.numel()) if x.device.type == "cpu" else len(x)
        for i in range(0, len(x), at_once):
            own = slice(i, i + at_once)
            decays = (dt[own, :, None] * rate).exp_()
            after = x[own, :, None] * b[own, ..., None]  # inputs, then states after each token
            for decay, entered in zip(decays, after, strict=True):
                states = entered.addcmul_(decay, states)  # only this depends on the previous token
            outputs[own] = torch.matmul(c[own, :, None], after).squeeze(2)
        return outputs.transpose(0, 1), states

    return scan_rows((x * dt, dt, b, c), states, steps, step, chunk, _CHUNK)
