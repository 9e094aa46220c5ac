"""What was trained to draft for a model in torch, as its runner sees it, or that nothing was."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from tgi_trio.shard.contract import Choices, ShardSequence, StepPlan
from tgi_trio.shard.runner import Drafter
from tgi_trio.shard.speculation.assistant import AssistantDrafter
from tgi_trio.shard.speculation.eagle import EagleReader
from tgi_trio.shard.speculation.heads import HeadsDrafter
from tgi_trio.shard.speculation.hidden import LastStep
from tgi_trio.shard.speculation.mtp import MtpLayers, find_reader, make_drafter
from tgi_trio.shard.speculation.ngram import FollowingNgrams, NgramDrafter
from tgi_trio.shard.torch_backend.drafting.assistant import TorchAssistant
from tgi_trio.shard.torch_backend.drafting.eagle import TorchEagle
from tgi_trio.shard.torch_backend.drafting.heads import TorchHeads
from tgi_trio.shard.torch_backend.drafting.mtp import TorchMtp
from tgi_trio.shard.torch_backend.kv_cache import KVCache


class TrainedDrafter:
    """At most one of: heads, a layer with K and V of its own, an assistant that reads the model's.

    Without any, n-grams draft.
    """

    def __init__(
        self,
        heads: TorchHeads | None = None,
        layers: TorchEagle | TorchMtp | MtpLayers | None = None,
        assistant: TorchAssistant | None = None,
        *,
        last: LastStep | None = None,
        own_head: bool = False,
    ) -> None:
        """`layers`: of a drafter or of the model's own; `last`: keeps what heads and assistants
        read, and drafts that steps on a device make; `own_head`: heads have a copy of the model's.
        """
        self._heads = heads
        self._layers = layers
        self._assistant = assistant
        self._last = last or LastStep()
        self._own_head = own_head
        self._reader: EagleReader | None = None  # made with the drafter

    @property
    def kv_bytes_per_token(self) -> int:
        beside = self._layers or self._assistant
        return 0 if beside is None else beside.kv_bytes_per_token

    def nbytes(self) -> int:
        """Return the bytes of its weights."""
        if (own := self._layers or self._assistant) is not None:
            return own.nbytes()
        return 0 if self._heads is None else self._heads.nbytes(own_head=self._own_head)

    @property
    def caches(self) -> Sequence[torch.Tensor]:
        """What it keeps of tokens beside the model's cache, each [blocks * BLOCK_SIZE, ...]."""
        own = self._layers or self._assistant
        return () if own is None else own.caches

    def complete_caches(self) -> Sequence[torch.Tensor]:
        """Return `caches` of all tokens so far: they lack what has ended since it was read last."""
        if self._reader is not None:
            self._reader.read([])
        return self.caches

    def make_room(self, blocks: int, cache: KVCache) -> int:
        """Take memory beside the model's `cache` of so many blocks; return its bytes."""
        if self._reader is not None:
            self._reader.clear()
        taken = 0 if self._layers is None else self._layers.make_room(blocks)
        return taken + (0 if self._assistant is None else self._assistant.make_room(cache))

    def keep_kv(self, plan: StepPlan) -> None:
        """Keep what an assistant reads of the K and V that a step has written."""
        if self._assistant is not None:
            self._assistant.keep(plan)

    def keep(
        self,
        plan: StepPlan,
        sampled: NDArray[np.intp],
        choices: Choices,
        hidden: torch.Tensor,
        *,
        recorded: bool,
    ) -> None:
        """Keep what is read of a step's states `hidden` [T, features], whose tokens the host chose.

        `sampled`: the rows that chose; `recorded`: steps on a device keep what heads read.
        """
        if (self._heads or self._assistant) and not recorded and len(sampled):
            self._last.keep(plan, sampled, choices, partial(copy_rows, hidden))
        if self._reader is not None and self._layers is not None:
            read = hidden[:, -self._layers.features :]
            self._reader.keep(plan, sampled, choices, partial(copy_rows, read))

    def drafter(
        self, most: int, eos_ids: Iterable[int], *, recorded: bool, looks_up: bool
    ) -> Drafter:
        """Return the drafter of at most `most` tokens.

        `recorded`: steps on a device make the drafts of heads; `looks_up`: those of n-grams, too.
        """
        if self._layers is not None:
            self._reader = self._reader or find_reader(self._layers)
            return make_drafter(self._reader, most, eos_ids)
        if self._assistant is not None:
            return AssistantDrafter(self._assistant, self._last, most, eos_ids)
        if self._heads is None and looks_up:
            return FollowingNgrams(most, eos_ids, self._last)
        if self._heads is None:
            return NgramDrafter(most, eos_ids)
        heads, arithmetic = self._heads, None if recorded else self._heads
        return HeadsDrafter(heads.spec, arithmetic, self._last, most, eos_ids, heads.token_map)

    def drop(self, sequence: ShardSequence) -> None:
        """Forget a sequence."""
        if self._reader is not None:
            self._reader.drop(sequence)


def pick_rows(hidden: torch.Tensor, places: NDArray[np.int64]) -> torch.Tensor:
    """Return the rows of `hidden` at `places`, ascending; without a copy if these are all rows."""
    return hidden if len(places) == len(hidden) else copy_rows(hidden, places)


def copy_rows(hidden: torch.Tensor, places: NDArray[np.int64]) -> torch.Tensor:
    """Return a copy of rows of `hidden`, which the next recorded step may overwrite."""
    return hidden.index_select(0, torch.from_numpy(places).to(hidden.device))
