"""Keys and values of images, for cross-attention on a device that records steps.

They lie in pages that do not move, over which decodes attend as they do over the KV cache. Pages
hold single images, and groups of images that a row sees together, one behind the other. The least
recently used are evicted, and every rank evicts the same ones in the same steps. An image for which
there is no room is uploaded for its step alone, and that step is launched kernel by kernel.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from tgi_trio.ipc.startup import BLOCK_SIZE
from tgi_trio.model.specs.decoder import CrossAttentionSpec
from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.media.cross_spans import cross_spans
from tgi_trio.shard.media.features import CrossStates
from tgi_trio.shard.torch_backend.attention.interface import CapturableAttention
from tgi_trio.shard.torch_backend.attention.paged_cross_attention import PagedCrossTokens
from tgi_trio.shard.torch_backend.image_states import ImageSource
from tgi_trio.shard.torch_backend.kv_cache import NULL_BLOCK, KVCache, KVShape
from tgi_trio.shard.torch_backend.recordings.decode_plans import idle_plan
from tgi_trio.shard.torch_backend.staging import Staging, cut, packed_size, split
from tgi_trio.shard.torch_backend.step_features import RowImages

Group = tuple[int, ...]  # the numbers of images that are seen together
_SENDS = 16  # uploads of slots that may be in flight: a few for each new image


@dataclass(frozen=True, slots=True, eq=False)
class _Pages:
    """Where a group lies, and how many of its tokens are visible."""

    blocks: NDArray[np.int32]
    tokens: int
    visible: int


@dataclass(frozen=True, slots=True, eq=False)
class _Gathered(Sequence[torch.Tensor]):
    """K or V of an image, [S, heads, head_dim] for each layer, gathered when it is indexed."""

    slots: Sequence[torch.Tensor]  # all slots of the pages, by layer
    places: torch.Tensor  # int64 [S]

    def __getitem__(self, layer: int) -> torch.Tensor:  # type: ignore[override]
        return self.slots[layer].index_select(0, self.places)

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, slots=True, eq=False)
class RecordedImages:
    """The memory of a recording from which it reads the images of its rows."""

    cross_tokens: PagedCrossTokens
    memory: torch.Tensor  # uint8: everything that `refill` writes


class ImagePages:
    """Keys and values of images on one rank's device; see `KeptStates`."""

    def __init__(
        self,
        source: ImageSource,
        cross_attention: CrossAttentionSpec,
        attention: CapturableAttention,
        most: int,
    ) -> None:
        """`attention`: a backend used by nothing else; `most`: bytes of pages, over all heads."""
        self._source = source
        self._cross_attention = cross_attention
        self._attention = attention
        shape = source.shape
        self._blocks = 1 + most // (shape.bytes_per_token * BLOCK_SIZE)
        self._kv_heads = shape.mine.stop - shape.mine.start
        self._staging = Staging(source.device)
        self._slot_staging = Staging(source.device, turns=_SENDS)
        self._cache: KVCache | None = None  # set by `make_room`
        self._free: list[int] = []
        self._held: OrderedDict[Group, _Pages] = OrderedDict()

    @property
    def numbers(self) -> tuple[Group, ...]:
        """The groups that are held, the least recently used first."""
        return tuple(self._held)

    def make_room(self) -> None:
        """Allocate all pages, before free memory is measured; afterwards they hold nothing."""
        self._cache = None  # free the one of an earlier warm-up first: both may not fit
        shape = self._source.shape
        pages = KVShape(shape.layers, self._kv_heads, shape.head_dim)
        self._cache = KVCache(pages, self._blocks, shape.dtype, self._source.device)
        self._free = list(range(self._blocks - 1, NULL_BLOCK, -1))
        self._held.clear()

    @property
    def bytes_to_come(self) -> int:
        """Bytes allocated later: none, as `make_room` allocates all pages at once."""
        return 0

    # --- launched steps: see `ImageStates` -----------------------------------------------------

    def find(self, plan: StepPlan) -> tuple[RowImages, ...]:
        """Return the rows of a plan that attend to images, with the K and V to attend over."""
        rows = tuple(RowImages.find(plan))
        if not rows:
            return ()
        seen = {states.number: states for row in rows for states in row.states}
        wanted: set[Group] = {(number,) for number in seen}
        here = {number: self._find_one(states, wanted) for number, states in seen.items()}
        return tuple(
            replace(row, states=tuple(here[each.number] for each in row.states)) for row in rows
        )

    def _find_one(self, states: CrossStates, wanted: set[Group]) -> CrossStates:
        """Return an image with its K and V: those in the pages, if there is room for it there."""
        group = (states.number,)
        if group not in self._held:
            taken = self._source.take(states)
            if not self._hold(group, [taken], states.tokens, states.visible, wanted):
                return taken
        self._held.move_to_end(group)
        cache, (places,) = self._room, self._slot_staging.send([_slots(self._held[group])])
        keys, values = _Gathered(cache.key_slots, places), _Gathered(cache.value_slots, places)
        return replace(states, keys=keys, values=values)

    # --- recorded steps: see `PagedImages` -----------------------------------------------------

    def wants(self, plan: StepPlan) -> bool:
        """Return whether any row of a plan attends to images."""
        return any(True for _ in RowImages.find(plan))

    def fits(self, plan: StepPlan) -> bool:
        """Put into pages all images that a plan of decodes sees; False if they do not fit.

        Also False where a token before the first image attends to padding.
        """
        seen = list(self._seen_by(plan))
        if any(not group and self._cross_attention.blind == "reads all" for _, group, _ in seen):
            return False
        wanted = {group for _, group, _ in seen if group}
        for _, group, states in seen:
            if group and not self._hold_group(group, states, wanted):
                return False
        return True

    def reserve(self, size: int) -> RecordedImages:
        """Reserve the memory from which a recording of `size` decodes reads images."""
        plan, seeing = idle_plan(size, self._blocks), [np.zeros((size, 1), np.float32)]
        places = self._attention.arrays(plan)
        every = [*seeing, *places]
        memory = torch.zeros(packed_size(every), dtype=torch.uint8, device=self._source.device)
        self._staging.fill(memory, every)
        own, of_attention = cut(memory, [seeing, places])
        batch = self._attention.reserve(plan, self._room, of_attention)
        cross_tokens = PagedCrossTokens(
            self._attention,
            batch,
            self._kv_heads,
            seeing=split(own, seeing)[0],
            feeds=self._cross_attention.blind == "feeds",
        )
        return RecordedImages(cross_tokens, memory)

    def refill(self, recorded: RecordedImages, plan: StepPlan) -> None:
        """Tell a recording what the tokens of a padded plan see, which `fits` has accepted."""
        size = len(plan.token_ids)
        found = {token: self._held[group] for token, group, _ in self._seen_by(plan) if group}
        width = max((len(pages.blocks) for pages in found.values()), default=1)
        own = idle_plan(size, width)
        seeing = np.zeros((size, 1), np.float32)
        for token, pages in found.items():
            seeing[token] = 1.0
            own.context_lengths[token] = pages.visible
            own.block_tables[token, : len(pages.blocks)] = pages.blocks
        self._staging.fill(recorded.memory, [seeing, *self._attention.arrays(own)])

    def _seen_by(self, plan: StepPlan) -> Iterator[tuple[int, Group, tuple[CrossStates, ...]]]:
        """Yield (token, group that it sees, images) of each row with images, all being decodes."""
        for row in RowImages.find(plan):
            (span,) = cross_spans(
                row.places,
                row.first,
                row.end,
                together=self._cross_attention.together,
                untils=row.untils,
            )
            states = row.states[span.images.start : span.images.stop]
            yield row.tokens.start, tuple(each.number for each in states), states

    # --- pages ---------------------------------------------------------------------------------

    @property
    def _room(self) -> KVCache:
        if self._cache is None:
            raise RuntimeError("no pages have been made")
        return self._cache

    def _hold_group(
        self, group: Group, states: tuple[CrossStates, ...], wanted: set[Group]
    ) -> bool:
        """Make pages hold what is visible of a group; False if there is no room."""
        if group not in self._held:
            if len(group) == 1:
                parts, tokens = [self._source.take(states[0])], states[0].tokens
            else:
                both = wanted | {(each.number,) for each in states}
                parts = [self._find_one(each, both) for each in states]
                tokens = sum(each.visible for each in states)
            visible = sum(each.visible for each in states)
            if not self._hold(group, parts, tokens, visible, wanted):
                return False
        self._held.move_to_end(group)
        return True

    def _hold(
        self,
        group: Group,
        parts: Sequence[CrossStates],
        tokens: int,
        visible: int,
        wanted: set[Group],
    ) -> bool:
        """Write a group into pages: all tokens of a single image, the visible ones of several.

        False if there is no room beside the groups that are `wanted`.
        """
        count = -(-tokens // BLOCK_SIZE)
        others = [each for each in self._held if each not in wanted]
        room = len(self._free) + sum(len(self._held[each].blocks) for each in others)
        if count > room:
            return False
        for each in others:
            if len(self._free) >= count:
                break
            self._free += self._held.pop(each).blocks.tolist()
        blocks = np.array([self._free.pop() for _ in range(count)], np.int32)
        pages = self._held[group] = _Pages(blocks, tokens, visible)
        (slots,) = self._slot_staging.send([_slots(pages)])
        ends = [None if len(parts) == 1 else part.visible for part in parts]
        for layer in range(self._source.shape.layers):
            keys, values = (
                torch.cat([read[layer][:end] for read, end in zip(of, ends, strict=True)])
                for of in ([part.keys for part in parts], [part.values for part in parts])
            )
            self._room.key_slots[layer].index_copy_(0, slots, keys)
            self._room.value_slots[layer].index_copy_(0, slots, values)
        return True


def _slots(pages: _Pages) -> NDArray[np.int64]:
    """Return the slots of a group's tokens, int64 [S]."""
    slots = pages.blocks.astype(np.int64)[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)
    return slots.reshape(-1)[: pages.tokens]
