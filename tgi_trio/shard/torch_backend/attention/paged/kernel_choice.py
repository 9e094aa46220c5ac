"""Which kernel attends over a step's tiles, and what it is told of gates and of scaled queries.

Imported only where Triton is installed.
"""

from __future__ import annotations

from typing import Any

import torch

from tgi_trio.shard.torch_backend.attention.paged.latent_kernel import attend_latents
from tgi_trio.shard.torch_backend.attention.paged.paged_kernel import attend_tile
from tgi_trio.shard.torch_backend.attention.paged.spans import Spans
from tgi_trio.shard.torch_backend.attention.paged.spans_kernel import (
    attend_latent_spans,
    attend_spans,
)
from tgi_trio.shard.torch_backend.attention.paged.split_kv import DividedTiles, describe_gates
from tgi_trio.shard.torch_backend.layers.attention.log_scale import LogScale


def choose_kernel(
    work: DividedTiles | Spans, gates: torch.Tensor | None
) -> tuple[Any, list[torch.Tensor], dict[str, Any]]:
    """Return the kernel that attends, the gates that it reads, and constants.

    Gates are opened where parts are merged, if there are such.
    """
    if not isinstance(work, DividedTiles):
        return attend_spans, [], work.constants
    opening, each = describe_gates(None if work.parts > 1 else gates, work.out)
    return attend_tile, [opening], work.constants | {"EACH": each}


def choose_latent_kernel(
    work: DividedTiles | Spans, scale: LogScale | None, logs: torch.Tensor | None
) -> tuple[Any, tuple[torch.Tensor, ...], dict[str, Any]]:
    """Return the kernel that attends to latents, what scales the queries it reads, and constants.

    `logs`: of positions, as in `RotaryTable`. Over spans, queries have been scaled already; raises
    ValueError if they have not.
    """
    if not isinstance(work, DividedTiles):
        if scale is not None:
            raise ValueError("attention over spans does not scale queries")
        return attend_latent_spans, (), work.constants
    scaling = (work.out,) * 3 if scale is None else scale.describe(logs)
    return attend_latents, scaling, work.constants | {"SCALES": scale is not None}
