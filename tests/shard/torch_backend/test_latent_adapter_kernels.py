"""What adapters add around latents by a kernel, against the matrix that they change, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.shard.torch_backend.interpreter import DEVICE, need_triton

need_triton()

from tgi_trio.model.specs.decoder import LatentSpec  # noqa: E402  (Triton)
from tgi_trio.shard.torch_backend.adapters.step_tiles import list_tiles  # noqa: E402
from tgi_trio.shard.torch_backend.layers.adapters.adapter_layout import ENTRY, UNIT, SitePlace  # noqa: E402
from tgi_trio.shard.torch_backend.layers.adapters.slotted_latents import SlottedHeads  # noqa: E402
from tgi_trio.shard.torch_backend.layers.adapters.slotted_linear import (  # noqa: E402
    SlotMemory,
    choose_adapter_tiles,
)

HEADS, PLAIN, VALUE, RANK, ROTARY = 3, 24, 40, 72, 8  # fill no steps
SPEC = LatentSpec(
    rank=RANK, plain_dim=PLAIN, rotary_dim=ROTARY, value_dim=VALUE, query_rank=0, norm_eps=1e-6
)
OUTPUTS = HEADS * (PLAIN + VALUE)
SLOT_RANKS = 48  # no power of two
ROWS = [(1, 1), (-1, 3), (0, 21), (1, 2), (2, 40), (0, 1)]  # slot, tokens; the third changes others


def some(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("kind", ["few", "many"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_any_adapters_and_of_none(dtype: torch.dtype, kind: str) -> None:
    ranks = (16, 48)
    pairs = [
        (some(r, RANK, dtype=dtype, seed=r) / 8, some(OUTPUTS, r, dtype=dtype, seed=2 * r) / 4)
        for r in ranks
    ]
    numbers = torch.full((3, SLOT_RANKS * (RANK + OUTPUTS)), torch.nan, dtype=dtype)
    directory = torch.zeros((3, 2, ENTRY), dtype=torch.int32)
    for slot, (a, b) in enumerate(pairs):
        both = torch.cat((a.flatten(), b.flatten()))
        numbers[slot, : len(both)] = both
        directory[slot, 1] = torch.tensor((0, len(a), 0, a.numel() // UNIT, 0))
    slots, counts = (np.array(column) for column in zip(*ROWS, strict=True))
    starts = np.concatenate(([0], np.cumsum(counts)))
    tile = getattr(choose_adapter_tiles(dtype), kind)
    memory = SlotMemory(numbers.to(DEVICE), directory.to(DEVICE), SLOT_RANKS, tile=tile)
    memory.tiles = torch.from_numpy(list_tiles(slots, starts, tile.rows)).to(DEVICE)
    heads = SlottedHeads(SPEC, SitePlace(RANK, (0,), OUTPUTS, 1), memory)
    count = int(starts[-1])
    query = some(count, HEADS, PLAIN + ROTARY, dtype=dtype, seed=5)[..., :PLAIN]
    latents = some(count, HEADS, RANK + ROTARY, dtype=dtype, seed=6)[..., :RANK]
    absorbed = some(count, HEADS, RANK, dtype=dtype, seed=7)
    values = some(count, HEADS, VALUE, dtype=dtype, seed=8)
    found = [each.to(DEVICE, copy=True) for each in (absorbed, values)]
    heads.add_to_queries(query.to(DEVICE), found[0])
    heads.add_to_values(latents.to(DEVICE), found[1])

    exact = [each.double() for each in (absorbed, values)]
    for slot, first, end in zip(slots, starts, starts[1:], strict=False):
        if 0 <= slot < len(pairs):
            a, b = (each.double() for each in pairs[slot])
            keys, of_values = (b @ a).view(HEADS, -1, RANK).split((PLAIN, VALUE), 1)
            own = slice(int(first), int(end))
            exact[0][own] += torch.einsum("thd,hdr->thr", query[own].double(), keys)
            exact[1][own] += torch.einsum("thr,hvr->thv", latents[own].double(), of_values)
    step = 1e-5 if dtype is torch.float32 else 4 * torch.finfo(dtype).eps
    for ours, theirs, before in zip(found, exact, (absorbed, values), strict=True):
        torch.testing.assert_close(ours.double().cpu(), theirs, atol=step, rtol=step)
        assert torch.equal(ours[1:4].cpu(), before[1:4]) and not torch.equal(ours.cpu(), before)
