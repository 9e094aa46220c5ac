"""RG-LRU (De and others 2024: Griffin): a recurrence with a decay for each number of the state.

s <- a s + x, and the output is the state.
"""

from __future__ import annotations

from typing import Final

import torch

from tgi_trio.shard.torch_backend.states.scan import Parts, scan_rows
from tgi_trio.shard.torch_backend.states.steps import StateSteps

_CHUNK: Final = 64


def scan_gated(
    x: torch.Tensor, decay: torch.Tensor, states: torch.Tensor, steps: StateSteps
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs [T, width] and the states after the rows [R, width], all in float32.

    `x` [T, width]; `decay` a [T, width], from 0 to 1; `states` [R, width].
    """
    return scan_rows((x, decay), states, steps, _step, _chunk, _CHUNK)


def _step(parts: Parts, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, decay = parts
    states = states * decay + x
    return states, states


def _chunk(
    parts: Parts, there: torch.Tensor, states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    x = parts[0].masked_fill(~there[..., None], 0)
    decay = parts[1].masked_fill(~there[..., None], 1)
    reach = 1
    while reach < x.shape[1]:  # each pass doubles the number of tokens that are summed up
        x = torch.cat(
            (x[:, :reach], torch.addcmul(x[:, reach:], decay[:, reach:], x[:, :-reach])), 1
        )
        decay = torch.cat((decay[:, :reach], decay[:, reach:] * decay[:, :-reach]), 1)
        reach *= 2
    outputs = torch.addcmul(x, decay, states[:, None])
    return outputs, outputs[:, -1]
