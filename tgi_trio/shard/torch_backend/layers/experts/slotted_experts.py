"""The experts of a layer with LoRA adapters on a device, beside `slotted_linear.py`.

A grouped product says what all experts do to their tokens; two launches then add what the adapters
of these tokens do, in place. A third one, before, says which slot each token's adapter is in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from tgi_trio.shard.torch_backend.layers.adapters.adapter_layout import SitePlace
from tgi_trio.shard.torch_backend.layers.adapters.slotted_linear import (
    RANKS_TOGETHER,
    AdapterTile,
    SlotMemory,
)
from tgi_trio.shard.torch_backend.layers.experts.grouped_matrices import Routed, count_tiles
from tgi_trio.shard.torch_backend.padding import next_power_of_2

SPREAD: Final = 128  # tokens of a program that writes their slots
FEW_ROWS: Final = 16  # of a tile whose programs share the inputs of a row (split-K)
_LEAST_INPUTS: Final = 512  # of a program
_MOST_PARTS: Final = 4


@dataclass(frozen=True, slots=True, eq=False)
class SlottedExperts:
    """What adapters change of a layer's experts."""

    memory: SlotMemory
    inner: SitePlace  # of the first expert; those of the others follow
    down: SitePlace

    @property
    def used(self) -> bool:
        """Whether a row of the step has an adapter."""
        return self.memory.tiles is not None and self.memory.tile is not None

    def find_slots(self, tokens: int) -> torch.Tensor:
        """Return the slot of each token's adapter, int32 [tokens], -1 for none."""
        from tgi_trio.shard.torch_backend.kernels.experts.expert_adapters import spread_slots

        tiles = self.memory.tiles
        assert tiles is not None  # `used`
        slots = torch.empty(tokens, dtype=torch.int32, device=tiles.device)
        spread_slots[(-(-tokens // SPREAD),)](slots, tiles, tokens, len(tiles), BLOCK=SPREAD)
        return slots

    def add(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        routed: Routed,
        slots: torch.Tensor,
        *,
        inner: bool,
    ) -> None:
        """Add the adapters' part to `y`, what a grouped product has made of `x`.

        `inner`: it is the experts' first product, whose results are sorted by expert; else the
        second one, which reads sorted rows. `slots`: of tokens, from `find_slots`.
        """
        assert self.memory.tile is not None
        place = self.inner if inner else self.down
        add_members(y, x.contiguous(), routed, slots, place, self.memory, gathers=inner)

    def compile(self, tile: AdapterTile, experts: int, each: int) -> None:
        """Compile the kernels for a kind of tiles, by launches that do nothing.

        `experts` of a layer, and `each` of them of a token.
        """
        numbers, device = self.memory.numbers, self.memory.numbers.device
        pairs = torch.zeros((experts, 1), dtype=torch.int32, device=device)
        weights = numbers.new_zeros((1, each))
        routed = Routed(
            weights, pairs, torch.zeros(experts, dtype=torch.int32, device=device), each
        )
        slots = torch.full((1,), -1, dtype=torch.int32, device=device)
        before, self.memory.tile = self.memory.tile, tile
        for place, gathers in ((self.inner, True), (self.down, False)):
            x = numbers.new_zeros((1 if gathers else each, place.inputs))
            y = numbers.new_zeros((each, place.outputs))
            add_members(y, x, routed, slots, place, self.memory, gathers=gathers)
        self.memory.tile = before


def add_members(
    y: torch.Tensor,
    x: torch.Tensor,
    routed: Routed,
    slots: torch.Tensor,
    place: SitePlace,
    memory: SlotMemory,
    *,
    gathers: bool,
) -> None:
    """Add to `y` [pairs, outputs] the contributions of adapters for `x`, in place.

    `gathers`, `x` and the order of rows as for `multiply_groups`; `place`: of the first expert.
    """
    from tgi_trio.shard.torch_backend.kernels.experts import (
        expert_adapters as kernels,  # imports Triton
    )

    tile = memory.tile
    assert tile is not None
    tokens, each, pieces, ranks = len(slots), routed.each, len(place.starts), memory.ranks
    parts = 1 if tile.rows > FEW_ROWS else max(1, min(place.inputs // _LEAST_INPUTS, _MOST_PARTS))
    step = min(tile.ranks, ranks & -ranks)  # the largest power of two that divides `ranks`
    low = torch.empty((parts, tokens * each, pieces, ranks), dtype=torch.float32, device=x.device)
    groups = len(routed.counts)
    programs = count_tiles(routed, tile.rows)
    where = (memory.numbers, memory.directory, slots, routed.pairs, routed.counts, tokens)
    slot = (memory.numbers.stride(0), memory.directory.shape[1], place.first)
    shared = {"EACH": each, "GATHERS": gathers, "GROUPS": groups, "ROWS": tile.rows}
    shared |= {"PADDED_GROUPS": next_power_of_2(groups), "PIECES": pieces, "RANKS": ranks}
    launch = {"num_warps": tile.warps, "num_stages": tile.stages}
    kernels.shrink_members[(programs, pieces * (ranks // step), parts)](
        *(low, x, *where, place.inputs, *slot),
        PER_ROW=each * tokens // len(x) if gathers else each,
        STEP=step,
        DEPTH=tile.inputs,
        **shared,
        **launch,
    )
    kernels.expand_members[(programs, -(-place.outputs // tile.outputs))](
        *(y, low, *where, place.outputs, *slot),
        place.starts[1] if pieces > 1 else place.outputs,
        PARTS=parts,
        OUTPUTS=tile.outputs,
        DEPTH=RANKS_TOGETHER,
        **shared,
        **launch,
    )


def first_places(places: Sequence[SitePlace]) -> SitePlace:
    """Return the first of the experts' places; raises ValueError unless the others follow it."""
    first = places[0]
    pieces = len(first.starts)
    if any(place.first != first.first + i * pieces for i, place in enumerate(places)):
        raise ValueError("the directory entries of experts are not adjacent")
    return first
