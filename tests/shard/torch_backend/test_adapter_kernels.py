"""What adapters add to rows by kernels, against a product for every row by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.shard.torch_backend.interpreter import DEVICE, need_triton, sum_in_order

need_triton()

from tgi_trio.model.adapters.sites import Site  # noqa: E402  (Triton)
from tgi_trio.shard.adapters.numbers import AdapterNumbers  # noqa: E402
from tgi_trio.shard.adapters.parts import AdapterPart  # noqa: E402
from tgi_trio.shard.torch_backend.adapters.step_tiles import (  # noqa: E402
    list_tiles,
    most_tiles,
)
from tgi_trio.shard.torch_backend.layers.adapters import slotted_linear  # noqa: E402
from tgi_trio.shard.torch_backend.layers.adapters.adapter_layout import (  # noqa: E402
    ENTRY,
    SitePlace,
    SlotLayout,
)
from tgi_trio.shard.torch_backend.layers.adapters.slotted_linear import (  # noqa: E402
    AdapterTile,
    SlotMemory,
    add_adapters,
    choose_adapter_tiles,
    place_starts,
)

SITE = Site(0, "qkv")
# Neither fills its tiles. Queries, keys, values, and those of an index.
INPUTS, COUNTS = 88, (40, 24, 24, 24, 8)
OUTPUTS = sum(COUNTS)


class OneSite(SlotLayout):
    """A model of one linear, whose outputs are of several pieces."""

    def __init__(self, max_rank: int, inputs: int = INPUTS) -> None:
        self.ranks = -(-max_rank // 16) * 16
        starts = tuple(np.cumsum([0, *COUNTS[:-1]]).tolist())
        self.places = {SITE: SitePlace(inputs, starts, OUTPUTS, 0)}
        self.entries = len(COUNTS)
        self.capacity = self.ranks * (len(COUNTS) * inputs + OUTPUTS) + 4 * OUTPUTS


def make_adapter(
    ranks: Sequence[int], dtype: torch.dtype, seed: int, inputs: int = INPUTS
) -> AdapterNumbers:
    """Return an adapter with a pair for each piece, 0: none; one rank alone: a pair for all."""
    draw = np.random.default_rng(seed)

    def some(rows: int, columns: int) -> np.ndarray:
        values = draw.standard_normal((rows, columns)).astype(np.float32) * columns**-0.5
        return torch.from_numpy(values).to(dtype).float().numpy()

    starts = np.cumsum([0, *COUNTS]).tolist()
    if len(ranks) == 1:
        parts = [AdapterPart(some(ranks[0], inputs), some(OUTPUTS, ranks[0]), 0)]
    else:
        parts = [
            AdapterPart(some(r, inputs), some(count, r), start)
            for r, count, start in zip(ranks, COUNTS, starts, strict=False)
            if r
        ]
    return AdapterNumbers(b"", max(ranks), {SITE: tuple(parts)})


def fill(layout: SlotLayout, adapters: Sequence[AdapterNumbers], dtype: torch.dtype) -> SlotMemory:
    """Return slots with these adapters, and what is in none of them unwritten."""
    numbers = torch.full((len(adapters), layout.capacity), torch.nan, dtype=dtype)
    directory = torch.zeros((len(adapters), layout.entries, ENTRY), dtype=torch.int32)
    for slot, adapter in enumerate(adapters):
        packed = layout.pack(adapter, dtype)
        numbers[slot, : len(packed.numbers)] = packed.numbers
        directory[slot] = packed.directory
    return SlotMemory(numbers.to(DEVICE), directory.to(DEVICE), layout.ranks)


def run(
    memory: SlotMemory,
    layout: SlotLayout,
    x: torch.Tensor,
    y: torch.Tensor,
    rows: Sequence[tuple[int, int]],
    tile: AdapterTile,
) -> torch.Tensor:
    """Return what becomes of `y`; `rows`: (slot, tokens) of each, -1: no adapter."""
    slots, counts = (np.array(column) for column in zip(*rows, strict=True))
    starts = np.concatenate(([0], np.cumsum(counts)))
    assert starts[-1] == len(x)
    tiles = torch.from_numpy(list_tiles(slots, starts, tile.rows)).to(DEVICE)
    out = y.clone()
    place = layout.places[SITE]
    add_adapters(out, x, place, place_starts(place, DEVICE), memory, tiles, tile)
    return out


def add_exactly(
    adapters: Sequence[AdapterNumbers],
    x: torch.Tensor,
    y: torch.Tensor,
    rows: Sequence[tuple[int, int]],
) -> torch.Tensor:
    exact, at = y.double().cpu(), 0
    for slot, count in rows:
        for part in adapters[slot].sites[SITE] if slot >= 0 else ():
            a, b = (torch.from_numpy(m).double() for m in (part.a, part.b))
            own = exact[at : at + count, part.start : part.start + len(b)]
            if part.gains is not None and part.offsets is not None:
                own *= 1 + torch.from_numpy(part.gains).double()
                own += torch.from_numpy(part.offsets).double()
            own += x[at : at + count].double().cpu() @ a.T @ b.T
        at += count
    return exact


def some(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def scaled(adapter: AdapterNumbers, dtype: torch.dtype, seed: int) -> AdapterNumbers:
    """Return an adapter with gains and offsets as well."""
    draw = np.random.default_rng(seed)

    def some_of(part: AdapterPart) -> np.ndarray:
        values = draw.standard_normal(len(part.b)).astype(np.float32) / 4
        return torch.from_numpy(values).to(dtype).float().numpy()

    parts = tuple(
        replace(part, gains=some_of(part), offsets=some_of(part)) for part in adapter.sites[SITE]
    )
    return replace(adapter, sites={SITE: parts})


MIXED = [(2, 1), (-1, 2), (0, 1), (1, 19), (1, 1), (3, 40), (-1, 1), (0, 3)]


@pytest.mark.parametrize("kind", ["few", "many"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_of_any_adapters_and_of_none(dtype: torch.dtype, kind: str) -> None:
    """Ranks of 1 to 64, pieces that stay as they are, a pair for all outputs, ragged runs.

    Some have gains and offsets as well.
    """
    layout = OneSite(64)
    ranks = [(1, 64, 8), (16,), (0, 3, 0, 5), (48, 0, 33, 0, 7)]
    adapters = [make_adapter(each, dtype, seed) for seed, each in enumerate(ranks)]
    adapters[1:3] = [scaled(each, dtype, seed) for seed, each in enumerate(adapters[1:3])]
    memory = fill(layout, adapters, dtype)
    tokens = sum(count for _, count in MIXED)
    x, y = some(tokens, INPUTS, dtype=dtype), some(tokens, OUTPUTS, dtype=dtype, seed=1)
    tile = getattr(choose_adapter_tiles(dtype), kind)
    found = run(memory, layout, x, y, MIXED, tile)
    exact = add_exactly(adapters, x, y, MIXED)
    step = 1e-5 if dtype is torch.float32 else 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.double().cpu(), exact, atol=step, rtol=step)
    without = torch.cat([torch.full((n,), slot < 0) for slot, n in MIXED])
    assert torch.equal(found[without], y[without]) and not torch.equal(found, y)


@pytest.mark.parametrize("max_rank", [1, 16, 48])
def test_any_largest_rank(max_rank: int) -> None:
    layout = OneSite(max_rank)
    adapters = [make_adapter((max_rank, 1, max_rank), torch.float32, 0)]
    x, y = some(3, INPUTS, dtype=torch.float32), some(3, OUTPUTS, dtype=torch.float32, seed=1)
    memory = fill(layout, adapters, torch.float32)
    for tile in choose_adapter_tiles(torch.float32):
        found = run(memory, layout, x, y, [(0, 3)], tile)
        exact = add_exactly(adapters, x, y, [(0, 3)])
        torch.testing.assert_close(found.double().cpu(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["few", "many"])
def test_whose_else_the_rows_are_changes_no_bit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where among them a row stands; programs share its inputs."""
    sum_in_order(monkeypatch)
    monkeypatch.setattr(slotted_linear, "_LEAST_INPUTS", 64)
    layout, inputs = OneSite(16, 200), 200
    adapters = [make_adapter((r, r, r), torch.float32, r, inputs) for r in (4, 16)]
    memory = fill(layout, adapters, torch.float32)
    tile = getattr(choose_adapter_tiles(torch.float32), kind)
    assert slotted_linear.count_shares(tile, 40, inputs, invariant=False) == 3
    x, y = some(40, inputs, dtype=torch.float32), some(40, OUTPUTS, dtype=torch.float32, seed=1)
    mine = run(memory, layout, x, y, [(0, 40)], tile)[7:9]
    for rows in ([(1, 7), (0, 2), (1, 31)], [(-1, 7), (0, 2), (-1, 31)], [(0, 9), (1, 31)]):
        assert torch.equal(run(memory, layout, x, y, rows, tile)[7:9], mine)
    moved = torch.cat((x[7:9], x[:7], x[9:])), torch.cat((y[7:9], y[:7], y[9:]))
    assert torch.equal(run(memory, layout, *moved, [(0, 2), (1, 38)], tile)[:2], mine)


def test_tiles_are_runs_of_one_adapter() -> None:
    starts = np.array([0, 1, 2, 10, 50, 52, 53])
    tiles = list_tiles(np.array([3, 3, 1, 1, -1, 0]), starts, 16)
    assert tiles.tolist() == [[3, 0, 2], [1, 2, 16], [1, 18, 16], [1, 34, 16], [0, 52, 1]]
    assert list_tiles(np.array([-1]), np.array([0, 4]), 16).shape == (0, 3)


@given(
    st.lists(st.tuples(st.integers(-1, 5), st.integers(1, 70)), min_size=1, max_size=12),
    st.sampled_from([1, 16, 64]),
)
def test_no_step_has_more_tiles_than_recordings_have_room_for(
    rows: list[tuple[int, int]], most: int
) -> None:
    slots, counts = (np.array(column) for column in zip(*sorted(rows), strict=True))
    tiles = list_tiles(slots, np.cumsum([0, *counts]), most)
    assert len(tiles) <= most_tiles(counts.sum(), min(len(rows), 6), most)
