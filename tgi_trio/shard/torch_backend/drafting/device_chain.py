"""Chaining steps with drafts on the device, before the host has read any of them.

Heads draft after every choice of a recorded step, or n-grams are looked up after each row's last
token. So the device knows all that the next step needs: which drafts were right, where each row
therefore stands, and what is drafted from there. A recording ends by judging its drafts
(`kernels/drafting/verifying.py`) and begins by moving rows as the previous step judged. The host
plans as if all drafts were wrong, with blocks enough for all being right, and corrects its plan
when it reads the results. It uploads random numbers for every position to which a token may move.

Not used where a choice depends on earlier tokens: penalties, minimums, grammars, watermarks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from tgi_trio.ipc.startup import BLOCK_SIZE
from tgi_trio.shard.contract import ShardSequence, StepPlan
from tgi_trio.shard.sampling.philox import uniform
from tgi_trio.shard.torch_backend.attention.interface import DecodePlaces
from tgi_trio.shard.torch_backend.drafting.device_texts import DeviceTexts, Judged
from tgi_trio.shard.torch_backend.kernels.drafting.verifying import judge_drafts, move_rows
from tgi_trio.shard.torch_backend.sampling.choice_settings import ChoiceSettings, Choosing
from tgi_trio.shard.torch_backend.sampling.device_sampler import Found
from tgi_trio.shard.torch_backend.staging import Array, split


@dataclass(frozen=True, slots=True)
class Links:
    """How the decodes of a recording follow the previous step, in memory that does not move."""

    follows: torch.Tensor  # int32 [size], as for `move_rows`, like the next
    aheads: torch.Tensor
    slots: torch.Tensor  # int32 [size], from `DeviceTexts.arrays`, like the next; -1: no text
    ends: torch.Tensor
    numbers: torch.Tensor  # float64 [size, most + 1]


_OF_NOBODY: Final = (-1, 0, -1, 0, 0.0)  # padding of each of `Links`


class DeviceChain:
    """What one step leaves on the device for the next one."""

    def __init__(self, chosen: torch.Tensor, most: int, texts: DeviceTexts | None = None) -> None:
        """`chosen`: int64 [rows], each row's last token; `most`: drafts of a row.

        `texts`: for looking up n-grams; None: choices already come with drafts.
        """
        self._texts = texts
        rows, device = len(chosen), chosen.device
        self._chosen = chosen
        self._most = most
        self._moved = torch.zeros(rows, dtype=torch.int32, device=device)
        self._drafted = torch.zeros((rows, most), dtype=torch.int64, device=device)

    @property
    def looks_up(self) -> bool:
        """Whether n-grams are looked up on the device."""
        return self._texts is not None

    def make_room(self, rows: int, positions: int) -> None:
        """Allocate what so many rows of so many tokens need, before anything is recorded."""
        if self._texts is not None:
            self._texts.make_room(rows, positions)

    def holds(self, plan: StepPlan) -> bool:
        """Return whether texts have room for a plan of decodes and the tokens that it adds."""
        return self._texts is None or self._texts.holds(plan)

    def drop(self, row: ShardSequence) -> None:
        """Forget a sequence."""
        if self._texts is not None:
            self._texts.drop(row)

    def arrays(
        self, plan: StepPlan, choosing: Choosing, settings: ChoiceSettings, *, leads: bool
    ) -> list[Array]:
        """Return the arrays of `Links` for a plan of decodes whose rows all choose.

        `leads`: drafts may follow the step, so its texts are needed; `holds` has accepted it.
        """
        count = len(choosing)
        follows = np.full(count, -1, np.int32)
        numbers: NDArray[np.float64] = np.zeros((count, self._most + 1))
        if plan.moves and plan.inputs is not None:
            follows[:] = plan.inputs
            if settings.samples:
                every = choosing.positions[:, None] + np.arange(self._most + 1)
                seeds = np.repeat(settings.columns["seed"][choosing.owners], self._most + 1)
                drawn = uniform(seeds, every.ravel().astype(np.uint64))
                numbers = drawn.reshape(count, self._most + 1)
        texts: list[Array] = [np.full(count, -1, np.int32), np.zeros(count, np.int32)]
        if self._texts is not None and leads:
            texts = self._texts.arrays(plan, choosing)
        return [follows, choosing.aheads.astype(np.int32), *texts, numbers]

    def reserve(self, size: int, memory: torch.Tensor) -> Links:
        """Return the links of `size` decodes as views of memory that contains `pad`'s arrays."""
        return Links(*split(memory, self.pad([], size)))

    def move(
        self, ids: torch.Tensor, positions: torch.Tensor, places: DecodePlaces,
        links: Links, uniforms: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Move decodes by the drafts that were right in the previous step; fill in new drafts.

        Return the tokens to compute; `ids` are -1 where there was no draft.
        """
        tokens = torch.empty_like(ids)
        move_rows[(len(ids),)](
            *(tokens, ids, positions, places.slots, places.contexts, uniforms),
            *(links.follows, links.aheads, links.numbers, places.tables, places.width),
            *(self._moved, self._drafted, self._most),
            PAGE=BLOCK_SIZE,
        )
        return tokens

    def judge(
        self, found: Found, ids: torch.Tensor, positions: torch.Tensor, targets: torch.Tensor,
        links: Links,
    ) -> Found:  # fmt: skip
        """Judge a step's drafts, and leave the result and new drafts for the next step.

        Return what was found, with the new drafts.
        """
        there = found.drafts
        judge_drafts[(len(ids),)](
            *(self._chosen, self._moved, self._drafted),
            *(found.tokens, ids, targets, links.aheads),
            *(self._drafted if there is None else there.contiguous(), len(ids)),
            MOST=self._most,
            TAKES=there is not None,
        )
        if self._texts is None:
            return found
        judged = Judged(
            *(found.tokens, ids, positions, targets, links.aheads, self._moved),
            *(links.slots, links.ends),
        )
        return replace(found, drafts=self._texts.look_up(judged, self._drafted))

    def pad(self, arrays: Sequence[Array], size: int) -> list[Array]:
        """Return the arrays of `arrays` padded to `size` decodes; the padding follows nothing.

        If there are no arrays, everything is padding.
        """
        if not arrays:
            empty: NDArray[np.float64] = np.zeros((0, self._most + 1))
            arrays = [*[np.zeros(0, np.int32)] * 4, empty]
        return [
            np.concatenate((own, np.full((size - len(own), *own.shape[1:]), value, own.dtype)))
            for own, value in zip(arrays, _OF_NOBODY, strict=True)
        ]
