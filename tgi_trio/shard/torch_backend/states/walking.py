"""How programs go through rows token by token, where batch invariance is kept.

All are of one warp, so that what a state is read for is added up without waiting for other warps.
"""

from __future__ import annotations

from typing import Final

import torch

from tgi_trio.shard.torch_backend.states.steps import StateSteps

WARPS: Final = 1
CHANNELS: Final = 32  # of a program where each has a state of its own
_HELD: Final = 1 << 11  # numbers of a state that a program holds: 64 a thread


def count_walked(summed: int, padded: int) -> int:
    """Return of how many numbers, of `padded`, a program holds the states of `summed` numbers.

    All are powers of two.
    """
    return min(max(1, _HELD // summed), padded)


def list_walked(steps: StateSteps) -> tuple[torch.Tensor | int, ...]:
    """Return what kernels are told of the rows: see `walk_delta_rule`, from `starts` to `listed`.

    For decodes `starts` is any tensor.
    """
    return *steps.slots(), int(not steps.decodes)
