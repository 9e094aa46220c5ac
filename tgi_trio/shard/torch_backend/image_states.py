"""Keys and values of images for cross-attention: one rank's heads, on its device.

Only rank 0 has a vision tower. It broadcasts an image's keys and values when a plan contains the
image for the first time, and every rank keeps its part for later steps. All ranks evict by the same
rule in the same steps, so none has to be told what the others hold.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.model.split import kv_head_share
from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.media.features import CrossStates
from tgi_trio.shard.torch_backend.step_features import Broadcasting, RowImages


@dataclass(frozen=True, slots=True)
class CrossShape:
    """What cross-attention layers read of one token of an image."""

    layers: int
    kv_heads: int  # of all ranks
    head_dim: int
    dtype: torch.dtype
    mine: slice  # the heads of this rank

    @classmethod
    def of(
        cls, spec: DecoderSpec, dtype: torch.dtype, rank: int = 0, ranks: int = 1
    ) -> CrossShape | None:
        """Return the shape for a rank of a model; None if no layer attends to images."""
        layers = sum(layer.cross_attention is not None for layer in spec.layers)
        if not layers:
            return None
        mine = kv_head_share(spec, spec.kv_heads, rank, ranks)
        return cls(layers, spec.kv_heads, spec.head_dim, dtype, mine)

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes of K and V of all heads, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


class ImageSource:
    """Gets keys and values of images from rank 0's tower."""

    def __init__(
        self, shape: CrossShape, device: torch.device, ranks: Broadcasting | None = None
    ) -> None:
        self.shape = shape
        self.device = device
        self._ranks = ranks

    def take(self, states: CrossStates) -> CrossStates:
        """Return this rank's part of an image's states on rank 0; every rank has to call it."""
        keys, values = (
            tuple(self._receive(parts, layer, states.tokens) for layer in range(self.shape.layers))
            for parts in (states.keys, states.values)
        )
        return replace(states, keys=keys, values=values)

    def _receive(self, parts: Sequence[torch.Tensor], layer: int, tokens: int) -> torch.Tensor:
        """Return this rank's heads [S, heads, head_dim] of a layer's keys or values."""
        shape = self.shape
        if self._ranks is None or self._ranks.rank == 0:
            whole = parts[layer].to(self.device, shape.dtype).contiguous()
        else:
            size = (tokens, shape.kv_heads, shape.head_dim)
            whole = torch.empty(size, dtype=shape.dtype, device=self.device)
        if self._ranks is None:
            return whole
        self._ranks.broadcast(whole)
        if self._ranks.rank == 0 and whole is parts[layer]:
            return whole[:, shape.mine]  # a view: the tower's tensor is kept elsewhere anyway
        return whole[:, shape.mine].clone()


class KeptStates:
    """An LRU cache of images' keys and values, by image number."""

    def __init__(self, source: ImageSource, most: int) -> None:
        """`most`: bytes, counting all ranks' heads; exceeded only by what one step needs."""
        self._source = source
        self._most = most // source.shape.bytes_per_token  # tokens of images
        self._kept: OrderedDict[int, CrossStates] = OrderedDict()
        self._tokens = 0  # of all that are kept

    def make_room(self) -> None:
        """Forget everything; memory is allocated when images arrive."""
        self._kept.clear()
        self._tokens = 0

    @property
    def bytes_to_come(self) -> int:
        """The bytes of this rank's part of a full cache."""
        shape = self._source.shape
        mine: int = shape.mine.stop - shape.mine.start
        return self._most * shape.bytes_per_token * mine // shape.kv_heads

    @property
    def numbers(self) -> tuple[int, ...]:
        """The images that are kept, in the order in which they would be evicted."""
        return tuple(self._kept)

    def find(self, plan: StepPlan) -> tuple[RowImages, ...]:
        """Return the rows of a plan that attend to images, with the keys and values on this rank.

        Every rank has to call it with every plan, in the same order.
        """
        rows = tuple(RowImages.find(plan))
        if not rows:
            return ()
        seen = {states.number: states for row in rows for states in row.states}
        for number, states in seen.items():
            if number not in self._kept:
                self._kept[number] = self._source.take(states)
                self._tokens += states.tokens
            self._kept.move_to_end(number)
        while self._tokens > self._most and next(iter(self._kept)) not in seen:
            self._tokens -= self._kept.popitem(last=False)[1].tokens
        return tuple(
            replace(row, states=tuple(self._kept[each.number] for each in row.states))
            for row in rows
        )
