"""Features of images that a step's tokens stand for or attend to, on the model's device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.media.features import CrossStates


class Broadcasting(Protocol):
    """One of several ranks."""

    rank: int

    def broadcast(self, x: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class RowImages:
    """A row whose tokens attend to images."""

    tokens: slice  # of the step
    first: int  # position of the first of them
    end: int  # position after the last
    places: tuple[int, ...]  # of each image, its position
    untils: tuple[int | None, ...]  # of each image, see `HeldImage`
    states: tuple[CrossStates, ...]  # of each image

    @classmethod
    def find(cls, plan: StepPlan) -> Iterator[RowImages]:
        """Yield the rows of a plan that attend to images."""
        owners = range(len(plan.rows)) if plan.owners is None else plan.owners.tolist()
        for i, owner in enumerate(owners):
            row = plan.rows[owner]
            states = tuple(image.features.states for image in row.images)
            seen = tuple(each for each in states if each is not None)
            if not seen or len(seen) < len(states):
                continue
            start, stop = (int(at) for at in plan.query_starts[i : i + 2])
            first = int(plan.positions[start])
            places = tuple(int(image.positions[0]) for image in row.images)
            untils = tuple(image.until for image in row.images)
            yield cls(slice(start, stop), first, first + stop - start, places, untils, seen)


class RecordedCrossTokens(Protocol):
    """The tokens of a recorded step that attend to images; see `CrossTokens` in
    `layers/attention/cross_attention.py`."""

    def cast(self, dtype: torch.dtype) -> Any:
        """Return the `CrossTokens` for hidden states of a dtype."""
        ...


class ImageStates(Protocol):
    """What cross-attention layers read of images, on a rank that keeps its part of it."""

    def find(self, plan: StepPlan) -> tuple[RowImages, ...]:
        """Return the rows of a plan that attend to images, with what they read on this rank."""
        ...

    def make_room(self) -> None:
        """Allocate what is not allocated later, before free memory is measured."""
        ...

    @property
    def bytes_to_come(self) -> int:
        """The bytes that will be allocated later."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class StepFeatures:
    """`PlacedFeatures` on the model's device."""

    places: torch.Tensor  # int64 [N]
    rows: torch.Tensor  # float32 [N, hidden]
    deep: Mapping[int, torch.Tensor]  # float32 [N, hidden] by layer, see `PlacedFeatures`
    seeing: tuple[RowImages, ...] = ()
    # of a recorded step whose rows may attend to images
    cross_tokens: RecordedCrossTokens | None = None

    @classmethod
    def recorded(cls, cross_tokens: RecordedCrossTokens, device: torch.device) -> StepFeatures:
        """Return the features of a recorded step, in which none replace embeddings."""
        none = torch.empty(0, dtype=torch.int64, device=device)
        return cls(none, none, {}, cross_tokens=cross_tokens)

    @classmethod
    def of(
        cls, plan: StepPlan, device: torch.device, images: ImageStates | None = None
    ) -> StepFeatures | None:
        """Return a plan's features, None if it has none.

        `images`: keeps keys and values for cross-attention layers; None: they are read where the
        tower left them.
        """
        placed = plan.features
        seeing = tuple(RowImages.find(plan)) if images is None else images.find(plan)
        if placed is None:
            none = torch.empty(0, dtype=torch.int64, device=device)
            return cls(none, none, {}, seeing) if seeing else None
        return cls(
            torch.from_numpy(placed.places).to(device),
            torch.from_numpy(placed.rows).to(device),
            {layer: torch.from_numpy(rows).to(device) for layer, rows in placed.deep.items()},
            seeing,
        )

    def share(self, ranks: Broadcasting, hidden: int) -> StepFeatures:
        """Return rank 0's features [N, hidden] on every rank; other ranks know only their places.

        One rank alone computes the tower, so that no other holds one, and results cannot differ.
        """

        def receive(rows: torch.Tensor) -> torch.Tensor:
            whole = rows if ranks.rank == 0 else rows.new_empty((len(rows), hidden))
            return ranks.broadcast(whole.contiguous())

        if not len(self.places):
            return self
        rows, deep = receive(self.rows), {i: receive(each) for i, each in self.deep.items()}
        return StepFeatures(self.places, rows, deep, self.seeing)

    def place(self, x: torch.Tensor) -> torch.Tensor:
        """Return embeddings `x` [T, hidden], with features in place of the images' tokens."""
        if not len(self.places):
            return x
        return x.index_copy(0, self.places, self.rows.to(x.dtype))

    def deepen(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        """Return the output `x` [T, hidden] of a layer of `deep`, plus what images add to it."""
        return x.index_add(0, self.places, self.deep[layer].to(x.dtype))
