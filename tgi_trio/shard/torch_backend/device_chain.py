"""Steps with guesses that follow one another before the host has read any of them.

Where heads guess behind every choice of a recorded step, the device has all that the next step
needs: which guesses were right, so where each row stands, and what is guessed behind that. The
recording ends with a judgement (`kernels/following.py`) and begins with rows moved by that of the
step before. The host plans as if all guesses were wrong, with blocks for all being right, and finds
the same numbers when it reads what came down. It sends the random numbers of every place that a
token may move to.

Not where a choice depends on tokens in other ways: penalties, minimums, grammars, watermarks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.sampling.philox import uniform
from tgi_trio.shard.torch_backend.attention.interface import DecodePlaces
from tgi_trio.shard.torch_backend.kernels.following import judge_guesses, move_rows
from tgi_trio.shard.torch_backend.kv_cache import BLOCK_SIZE
from tgi_trio.shard.torch_backend.sampling.asking import Choosing, Settings
from tgi_trio.shard.torch_backend.staging import Array, Staging, packed_size, split


@dataclass(frozen=True, slots=True)
class Links:
    """How the decodes of a recording follow the step before, in memory that stays where it is."""

    memory: torch.Tensor  # uint8: all of it
    follows: torch.Tensor  # int32 [size], as `move_rows` wants them
    aheads: torch.Tensor
    numbers: torch.Tensor  # float64 [size, most + 1]


class DeviceChain:
    """What a step leaves for the next one on one device."""

    def __init__(self, chosen: torch.Tensor, most: int) -> None:
        """`chosen` int64 [rows]: each row's last token; `most`: guesses of a row."""
        rows, device = len(chosen), chosen.device
        self._chosen = chosen
        self._most = most
        self._moved = torch.zeros(rows, dtype=torch.int32, device=device)
        self._guessed = torch.zeros((rows, most), dtype=torch.int64, device=device)
        self._staging = Staging(device)

    def arrays(self, plan: StepPlan, choosing: Choosing, settings: Settings) -> list[Array]:
        """Return what `Links` say of a plan of decodes whose rows all choose."""
        count = len(choosing)
        follows = np.full(count, -1, np.int32)
        numbers: NDArray[np.float64] = np.zeros((count, self._most + 1))
        if plan.moves and plan.inputs is not None:
            follows[:] = plan.inputs
            if settings.samples.any():
                every = choosing.positions[:, None] + np.arange(self._most + 1)
                seeds = np.repeat(settings.seeds[choosing.owners], self._most + 1)
                drawn = uniform(seeds, every.ravel().astype(np.uint64))
                numbers = drawn.reshape(count, self._most + 1)
        return [follows, choosing.aheads.astype(np.int32), numbers]

    def reserve(self, size: int) -> Links:
        """Return memory for the links of `size` decodes, which follow nothing."""
        arrays = self._padded([], size)
        device = self._chosen.device
        memory = torch.zeros(packed_size(arrays), dtype=torch.uint8, device=device)
        self._staging.fill(memory, arrays)
        return Links(memory, *split(memory, arrays))

    def refill(self, links: Links, arrays: Iterable[Array]) -> None:
        """Replace links by those that `arrays` has returned; none: nothing is followed."""
        self._staging.fill(links.memory, self._padded(list(arrays), len(links.follows)))

    def move(
        self, ids: torch.Tensor, positions: torch.Tensor, places: DecodePlaces,
        links: Links, uniforms: torch.Tensor,
    ) -> None:  # fmt: skip
        """Move decodes by what was right in the step before, and fill in what was guessed there."""
        move_rows[(len(ids),)](
            *(ids, positions, places.slots, places.contexts, uniforms),
            *(links.follows, links.aheads, links.numbers, places.tables, places.width),
            *(self._moved, self._guessed, self._most),
            PAGE=BLOCK_SIZE,
        )

    def judge(
        self, found: torch.Tensor, ids: torch.Tensor, targets: torch.Tensor, links: Links,
        guesses: torch.Tensor,
    ) -> None:  # fmt: skip
        """Leave to the next step where its rows begin, and what is guessed from there."""
        judge_guesses[(len(ids),)](
            *(self._chosen, self._moved, self._guessed),
            *(found, ids, targets, links.aheads, guesses.contiguous(), len(ids)),
            MOST=self._most,
        )

    def _padded(self, arrays: list[Array], size: int) -> list[Array]:
        """Return the arrays of as many decodes, those behind the given ones of nobody."""
        if not arrays:
            empty: NDArray[np.float64] = np.zeros((0, self._most + 1))
            arrays = [np.zeros(0, np.int32), np.zeros(0, np.int32), empty]
        more = size - len(arrays[0])
        follows, aheads, numbers = arrays
        return [
            np.concatenate((follows, np.full(more, -1, np.int32))),
            np.concatenate((aheads, np.zeros(more, np.int32))),
            np.concatenate((numbers, np.zeros((more, self._most + 1)))),
        ]
