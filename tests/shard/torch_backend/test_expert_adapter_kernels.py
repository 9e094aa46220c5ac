"""What adapters add to rows of experts by kernels, against a product for every row by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.shard.torch_backend.interpreter import DEVICE, need_triton, sum_in_order

need_triton()

from tgi_trio.shard.torch_backend.adapters.step_tiles import list_tiles  # noqa: E402  (Triton)
from tgi_trio.shard.torch_backend.layers.adapters.adapter_layout import ENTRY, UNIT, SitePlace  # noqa: E402
from tgi_trio.shard.torch_backend.layers.adapters.slotted_linear import (  # noqa: E402
    SlotMemory,
    choose_adapter_tiles,
)
from tgi_trio.shard.torch_backend.layers.experts.grouped_matrices import Routed  # noqa: E402
from tgi_trio.shard.torch_backend.layers.experts.slotted_experts import (  # noqa: E402
    SlottedExperts,
    first_places,
)

EXPERTS, EACH, SLOTS, TOKENS = 5, 2, 3, 37
INPUTS, WIDTH = 88, 40  # neither fills a tile
RANKS = (16, 32, 16)  # of each slot, of which the second uses both steps of the kernels


class Experts:
    """Two pieces of each expert, in slots with random numbers; the last slot lacks ups."""

    def __init__(self, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        found: list[torch.Tensor] = []
        directory = torch.zeros((SLOTS, EXPERTS * 2, ENTRY), dtype=torch.int32)
        self.pairs: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        rows = []
        for slot, rank in enumerate(RANKS):
            found, at = [], 0
            for expert in range(EXPERTS):
                for piece in range(1 if slot == SLOTS - 1 else 2):
                    a = torch.randn(rank, INPUTS, generator=draw) * INPUTS**-0.5
                    b = torch.randn(WIDTH, rank, generator=draw)
                    self.pairs[slot, expert, piece] = a, b
                    entry = (piece, rank, at // UNIT, (at + a.numel()) // UNIT, 0)
                    directory[slot, 2 * expert + piece] = torch.tensor(entry, dtype=torch.int32)
                    found += [a.reshape(-1), b.reshape(-1)]
                    at += a.numel() + b.numel()
            rows.append(torch.cat(found))
        capacity = max(map(len, rows))
        numbers = torch.full((SLOTS, capacity), torch.nan)  # what nobody may read
        for slot, row in enumerate(rows):
            numbers[slot, : len(row)] = row
        self.memory = SlotMemory(numbers.to(DEVICE), directory.to(DEVICE), max(RANKS), True)
        places = [SitePlace(INPUTS, (0, WIDTH), 2 * WIDTH, 2 * i) for i in range(EXPERTS)]
        self.changes = SlottedExperts(self.memory, first_places(places), places[0])
        chosen = torch.stack(
            [torch.randperm(EXPERTS, generator=draw)[:EACH] for _ in range(TOKENS)]
        )
        self.lists = [(chosen == e).reshape(-1).nonzero()[:, 0] for e in range(EXPERTS)]
        pairs = torch.zeros((EXPERTS, TOKENS), dtype=torch.int32)
        for expert, own in enumerate(self.lists):
            pairs[expert, : len(own)] = own
        counts = torch.tensor([len(own) for own in self.lists], dtype=torch.int32)
        weights = torch.zeros((TOKENS, EACH))
        self.routed = Routed(weights.to(DEVICE), pairs.to(DEVICE), counts.to(DEVICE), EACH)
        self.x = torch.randn(TOKENS, INPUTS, generator=draw)
        self.y = torch.randn(TOKENS * EACH, 2 * WIDTH, generator=draw)

    def run(self, slots: list[int], *, many: bool) -> torch.Tensor:
        """Return what becomes of `y`, whose rows are sorted by expert; `slots`: of tokens."""
        tiles = choose_adapter_tiles(torch.float32)
        self.memory.tile = tiles.many if many else tiles.few
        starts = np.arange(len(slots) + 1)
        listed = list_tiles(np.array(slots), starts, self.memory.tile.rows)
        self.memory.tiles = torch.from_numpy(listed).to(DEVICE)
        assert self.changes.used
        told = self.changes.find_slots(TOKENS)
        assert told.tolist() == slots
        out = self.y.clone().to(DEVICE)
        self.changes.add(out, self.x.to(DEVICE), self.routed, told, inner=True)
        return out.cpu()

    def add_exactly(self, slots: list[int]) -> torch.Tensor:
        out, row = self.y.double().clone(), 0
        for expert, own in enumerate(self.lists):
            for pair in own.tolist():
                for piece in range(2):
                    if found := self.pairs.get((slots[pair // EACH], expert, piece)):
                        a, b = (each.double() for each in found)
                        part = b @ (a @ self.x[pair // EACH].double())
                        out[row, piece * WIDTH : (piece + 1) * WIDTH] += part
                row += 1
        return out


@pytest.mark.parametrize("many", [False, True], ids=["few", "many"])
def test_rows_of_any_adapters_and_none(many: bool) -> None:
    experts = Experts(1)
    for slots in ([i % 4 - 1 for i in range(TOKENS)], [1] * TOKENS, [-1] * 36 + [2]):
        found = experts.run(slots, many=many)
        torch.testing.assert_close(found.double(), experts.add_exactly(slots), atol=1e-4, rtol=0.0)


def test_others_adapters_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the tokens that keep their adapter, whatever slots the others are in."""
    sum_in_order(monkeypatch)
    experts = Experts(2)
    kept = [token % 3 == 0 for token in range(TOKENS)]
    rows = [kept[pair // EACH] for own in experts.lists for pair in own.tolist()]
    first = experts.run([0 if keeps else 1 for keeps in kept], many=False)[rows]
    for other in (-1, 0, 2):
        again = experts.run([0 if keeps else other for keeps in kept], many=False)[rows]
        assert torch.equal(again, first)
