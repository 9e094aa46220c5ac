"""Selecting the best of an index's scores, by itself: what to measure of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

import torch

_MOST: Final = 2048  # units that are selected, as by DeepSeek V3.2
_ROWS: Final = ((1, 32768), (1, 131072), (16, 131072), (64, 32768), (256, 32768), (1024, 16384))
_FEW: Final = ((2, 9000),)
Run = Callable[[], Mapping[str, torch.Tensor]]


def list_selections(device: torch.device, *, small: bool) -> Iterator[tuple[str, Run, Run]]:
    """Yield what is measured: its name, the kernel, and torch's operations.

    Scores are normally distributed or, as the worst that there is, all alike: then a sample says
    nothing, and one program reads all of a row five times. `small`: for a dry run.
    """
    from tgi_trio.shard.torch_backend.attention.indexed.selecting import UnitScores, select_best
    from tgi_trio.shard.torch_backend.attention.paged.paged_attention import (
        PagedAttention,  # it imports Triton
    )
    from tgi_trio.shard.torch_backend.kv_cache import KVCache, KVShape
    from tgi_trio.shard.torch_backend.layers.attention.index import choose_best
    from tgi_trio.shard.torch_backend.recordings.decode_plans import idle_plan

    cache = KVCache(KVShape(1, 1, 16), 2, torch.float32, device)
    batch = PagedAttention(device).prepare(idle_plan(1, 1), cache)
    for rows, units in _FEW if small else _ROWS:
        for kind in ("", "alike "):
            scores = torch.randn((rows, units), device=device)
            if kind:
                scores.fill_(1.0)
            visible = torch.full((rows,), units, dtype=torch.int32, device=device)
            found = UnitScores(scores, visible)

            def run(found: UnitScores = found) -> Mapping[str, torch.Tensor]:
                return {"output": select_best(found, _MOST, batch).units.float()}

            def of_torch(found: UnitScores = found) -> Mapping[str, torch.Tensor]:
                return {"output": choose_best(found.scores, _MOST).float()}

            yield f"{rows} {kind}rows of {units} scores", run, of_torch
