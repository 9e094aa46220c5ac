"""What a recorded step is made of: what it begins and ends with, and the memory that it reads.

For `decode_graphs.py`, which records and replays steps, and for who computes, captures or launches
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.torch_backend.layers.slotted_linear import ReservedTiles
from tgi_trio.shard.torch_backend.recordings.image_pages import RecordedImages
from tgi_trio.shard.torch_backend.recordings.token_source import TokenSource
from tgi_trio.shard.torch_backend.staging import Array, Sheet
from tgi_trio.shard.torch_backend.states.steps import StepStates
from tgi_trio.shard.torch_backend.step_features import StepFeatures

if TYPE_CHECKING:  # it imports Triton
    from tgi_trio.shard.torch_backend.guessing.device_chain import DeviceChain, Links
    from tgi_trio.shard.torch_backend.sampling.device_sampler import (
        DeviceSampler,
        Found,
        Reserved,
        ReservedMasks,
    )


class Graph(Protocol):
    """Recorded work: reads and writes the tensors it was recorded with."""

    def replay(self) -> None: ...


Compute = Callable[[], torch.Tensor]
IdleSteps = Callable[[int], Compute]  # of so many rows that decode nothing


class CaptureError(Exception):
    """Work cannot be recorded. The text says why; the device can be used as before."""


class Capture(Protocol):
    """Records work; the tensor is what replays write. Raises CaptureError."""

    def __call__(self, compute: Compute, /) -> tuple[Graph, torch.Tensor]: ...
    def rehearsing(self) -> AbstractContextManager[None]: ...  # meanwhile it runs work once


class DecodeForward(Protocol):
    """`Model.forward`, as far as decodes are concerned."""

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        lengths: torch.Tensor,
        attention: Any,
        batch: Any,
        states: StepStates | None = None,
        *,
        features: StepFeatures | None = None,
    ) -> torch.Tensor: ...


class RecordedAdapters(Protocol):
    """Adapters as recordings have them; each reads what `refill` tells it."""

    @property
    def used(self) -> bool: ...  # by the step at hand
    def fits(self, reserved: ReservedTiles, /) -> bool: ...  # a recording holds what it has
    def reserve(self, tokens: int, rows: int, *, decodes: bool) -> ReservedTiles: ...
    def recording(self, reserved: ReservedTiles, /) -> AbstractContextManager[None]: ...
    def refill(self, reserved: ReservedTiles, /) -> None: ...


class PagedImages(Protocol):
    """Images that layers attend to, as recordings have them; each reads what `refill` tells it."""

    def wants(self, plan: StepPlan) -> bool: ...  # a row of it attends to some
    def fits(self, plan: StepPlan) -> bool: ...  # what its decodes see has its place
    def reserve(self, size: int) -> RecordedImages: ...  # what one of `size` decodes reads
    def refill(self, recorded: RecordedImages, plan: StepPlan) -> None: ...


class StepKind(NamedTuple):
    """What some of a step's rows have."""

    adapted: bool = False
    crossed: bool = False


@dataclass(frozen=True, slots=True)
class Ends:
    """What a recorded step begins and ends with: tokens of the step before, logits, a choice."""

    tokens: TokenSource
    logits: Callable[[torch.Tensor], torch.Tensor]
    sampler: DeviceSampler | None = None  # None: another rank chooses
    chain: DeviceChain | None = None  # None: no step follows guesses that nobody has read


@dataclass(slots=True)
class Chosen:
    """What a step chose, on the device and valid until the next one."""

    # [R, >= vocab] what is left to choose from: logits, or `DeviceSampler.choose`'s scores
    scores: torch.Tensor
    found: Found | None  # None: it has chosen nothing yet
    hidden: torch.Tensor | None = None  # [R, features] of the scores, for those who guess on
    size: int = 0  # of the recording that has made the scores; 0: none has
    # int64 [R] that it computed, where steps are chained; -1: token 0, as nothing was guessed
    ids: torch.Tensor | None = None


@dataclass(slots=True)
class RecordedStep:
    """A graph and the memory it writes."""

    graph: Graph
    hidden: torch.Tensor  # [size, hidden]
    chosen: Chosen | None
    # What is of so many rows, by that, whether they choose, and whether any lists tokens.
    parts: dict[tuple[int, bool, bool], Chosen] = field(default_factory=dict)


@dataclass(slots=True)
class MaskedChoice:
    """A graph that chooses from the scores of another one, with masks."""

    graph: Graph
    asked: Reserved
    masks: ReservedMasks
    found: Found  # of `size` choices


@dataclass(slots=True)
class StepMemory:
    """What the graphs of a batch size read; it stays where it is."""

    size: int
    # Token ids, positions, lengths, inputs and slots of states; what the chain, the sampler and at
    # last the attention are told. One copy fills it.
    sheet: Sheet
    ids: torch.Tensor  # [size], as are the next three: views of its target
    positions: torch.Tensor
    lengths: torch.Tensor
    inputs: torch.Tensor
    states: StepStates | None
    batch: Any  # the attention's own
    asked: Reserved | None  # the sampler's own
    links: Links | None  # the chain's own
    unlinked: list[Array]  # what those are told of decodes that follow nothing
    moving: tuple[int, ...]  # places in the sheet of token ids, positions, slots and contexts
    adapters: ReservedTiles | None  # the adapters' own
    images: RecordedImages | None  # the pages' own


@dataclass(slots=True)
class Recording:
    """The graphs of a batch size."""

    memory: StepMemory
    steps: Mapping[StepKind, RecordedStep]  # of those kinds that there may be
    masked: MaskedChoice | None
