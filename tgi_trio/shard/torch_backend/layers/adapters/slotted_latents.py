"""The matrix that expands latents with LoRA adapters on a device, beside `slotted_linear.py`.

It is absorbed in products of each head (`layers/attention/latent.py`). A launch after each of these
two adds what the adapters of a step's rows do, in place.
"""

from __future__ import annotations

from typing import Final

import torch

from tgi_trio.model.specs.decoder import LatentSpec
from tgi_trio.shard.torch_backend.layers.adapters.adapter_layout import SitePlace
from tgi_trio.shard.torch_backend.layers.adapters.slotted_linear import AdapterTile, SlotMemory
from tgi_trio.shard.torch_backend.padding import next_power_of_2

ROWS: Final = 16  # of a program
_MOST_BYTES: Final = 1 << 14  # of A or B in one step of a loop
_MOST_STEP: Final = 64  # inputs or outputs of one step


def choose_step(ranks: int, dtype: torch.dtype) -> int:
    """Return the inputs or outputs of one step of the loops, for so many padded ranks."""
    return max(16, min(_MOST_STEP, _MOST_BYTES // (ranks * dtype.itemsize)))


class SlottedHeads:
    """Implements `ChangeHeads` for a layer."""

    def __init__(self, spec: LatentSpec, place: SitePlace, memory: SlotMemory) -> None:
        self._spec = spec
        self._place = place
        self._memory = memory

    @property
    def acts(self) -> bool:
        return self._memory.tiles is not None

    def add_to_queries(self, plain: torch.Tensor, absorbed: torch.Tensor) -> None:
        self._add(absorbed, plain, keys=True)

    def add_to_values(self, latents: torch.Tensor, values: torch.Tensor) -> None:
        self._add(values, latents, keys=False)

    def compile(self, tile: AdapterTile) -> None:
        """Compile the kernel for a kind of tiles, by launches that do nothing."""
        spec, numbers = self._spec, self._memory.numbers
        each = spec.plain_dim + spec.value_dim
        heads = self._place.outputs // each
        tiles = torch.zeros((1, 3), dtype=torch.int32, device=numbers.device)
        # Rows of what heads have begin as in a step: the kernel is compiled for such strides.
        rows = numbers.new_zeros((1, heads, spec.plain_dim + spec.rotary_dim))
        latents = numbers.new_zeros((1, heads, spec.rank + spec.rotary_dim))
        for x, size, keys in (
            (rows[..., : spec.plain_dim], spec.rank, True),
            (latents[..., : spec.rank], spec.value_dim, False),
        ):
            out = numbers.new_zeros((1, heads, size))
            self._launch(out, x, tiles, tile.rows, keys=keys)

    def _add(self, out: torch.Tensor, x: torch.Tensor, *, keys: bool) -> None:
        memory = self._memory
        if memory.tiles is not None and memory.tile is not None:
            self._launch(out, x, memory.tiles, memory.tile.rows, keys=keys)

    def _launch(
        self, out: torch.Tensor, x: torch.Tensor, tiles: torch.Tensor, most: int, *, keys: bool
    ) -> None:
        """Add to `out` [T, heads, outputs] what `x` [T, heads, inputs] gives, in place.

        `tiles`: int32 [n, 3], of at most `most` tokens; `keys`: `x` has queries.
        """
        from tgi_trio.shard.torch_backend.kernels.adapters.latent_adapters import (
            adapt_heads,  # Triton
        )

        memory, spec = self._memory, self._spec
        ranks = next_power_of_2(memory.ranks)
        step = choose_step(ranks, x.dtype)
        adapt_heads[(len(tiles), x.shape[1], -(-most // ROWS))](
            *(out, x, memory.numbers, memory.directory, tiles, x.stride(0), x.stride(1)),
            *(memory.numbers.stride(0), memory.directory.shape[1], self._place.first),
            KEYS=keys,
            INPUTS=x.shape[2],
            OUTPUTS=out.shape[2],
            PLAIN=spec.plain_dim,
            EACH=spec.plain_dim + spec.value_dim,
            RANKS=ranks,
            ROWS=ROWS,
            DEPTH=step,
            COLUMNS=step,
        )
