"""The parts of a recorded step: what it begins and ends with, and the memory that it reads.

The modules that record and replay steps share them with those that compute, capture and launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.torch_backend.layers.adapters.slotted_linear import ReservedTiles
from tgi_trio.shard.torch_backend.recordings.image_pages import RecordedImages
from tgi_trio.shard.torch_backend.recordings.token_source import TokenSource
from tgi_trio.shard.torch_backend.staging import Array, Sheet
from tgi_trio.shard.torch_backend.states.steps import StepStates
from tgi_trio.shard.torch_backend.step_features import StepFeatures

if TYPE_CHECKING:  # it imports Triton
    from tgi_trio.shard.torch_backend.drafting.device_chain import DeviceChain, Links
    from tgi_trio.shard.torch_backend.sampling.device_sampler import (
        DeviceSampler,
        Found,
        Reserved,
        ReservedMasks,
    )


class Graph(Protocol):
    """A captured CUDA graph: a replay reads and writes the tensors of the capture."""

    def replay(self) -> None: ...


Compute = Callable[[], torch.Tensor]
IdleSteps = Callable[[int], Compute]  # returns a step of so many rows that decode nothing


class CaptureError(Exception):
    """Work cannot be captured. The text says why; the device remains usable."""


class Capture(Protocol):
    """Captures work as a graph; the tensor is what replays write. Raises CaptureError."""

    def __call__(self, compute: Compute, /) -> tuple[Graph, torch.Tensor]: ...
    def rehearsing(self) -> AbstractContextManager[None]: ...  # inside, work is run once instead


class DecodeForward(Protocol):
    """`Model.forward`, as far as recorded steps use it."""

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
    """Adapters in recordings, which read the memory that `refill` writes."""

    @property
    def used(self) -> bool: ...  # by any row of the present step
    def fits(self, reserved: ReservedTiles, /) -> bool: ...  # the step's adapters have room in it
    def reserve(self, tokens: int, rows: int, *, decodes: bool) -> ReservedTiles: ...
    def recording(self, reserved: ReservedTiles, /) -> AbstractContextManager[None]: ...
    def refill(self, reserved: ReservedTiles, /) -> None: ...


class PagedImages(Protocol):
    """Images that layers attend to, in recordings, which read the memory that `refill` writes."""

    def wants(self, plan: StepPlan) -> bool: ...  # whether any row attends to images
    def fits(self, plan: StepPlan) -> bool: ...  # pages hold all that its decodes see
    def reserve(self, size: int) -> RecordedImages: ...  # memory of a recording of `size` decodes
    def refill(self, recorded: RecordedImages, plan: StepPlan) -> None: ...


class StepKind(NamedTuple):
    """Whether any row of a step has an adapter, and whether any attends to images."""

    adapted: bool = False
    crossed: bool = False


@dataclass(frozen=True, slots=True)
class Ends:
    """What a recorded step begins and ends with: the previous step's tokens, logits, a choice."""

    tokens: TokenSource
    logits: Callable[[torch.Tensor], torch.Tensor]
    sampler: DeviceSampler | None = None  # None: another rank chooses
    chain: DeviceChain | None = None  # None: steps are not chained behind drafts


@dataclass(slots=True)
class Chosen:
    """What a step chose, on the device; valid until the next step."""

    # [R, >= vocab]: logits, or the scores that `DeviceSampler.choose` leaves for a later choice
    scores: torch.Tensor
    found: Found | None  # None: nothing has been chosen yet
    hidden: torch.Tensor | None = None  # [R, features], from which the scores are
    size: int = 0  # of the recording that made the scores; 0: the step was launched
    # int64 [R]: the tokens that a chained step computed; -1 where there was no draft (token 0)
    ids: torch.Tensor | None = None


@dataclass(slots=True)
class RecordedStep:
    """A graph, and the memory that it writes."""

    graph: Graph
    hidden: torch.Tensor  # [size, hidden]
    chosen: Chosen | None
    # Views for a number of rows, by (rows, whether they choose, whether any lists top tokens).
    parts: dict[tuple[int, bool, bool], Chosen] = field(default_factory=dict)


@dataclass(slots=True)
class MaskedChoice:
    """A graph that chooses, with masks, from the scores that another graph left."""

    graph: Graph
    reserved: Reserved
    masks: ReservedMasks
    found: Found  # for all rows of the recording


@dataclass(slots=True)
class StepMemory:
    """What the graphs of a batch size read; it does not move."""

    size: int
    # Image on the host of: token ids, positions, lengths, inputs, state slots, then what the chain,
    # the sampler and finally the attention read. One copy uploads it.
    sheet: Sheet
    ids: torch.Tensor  # [size]; this and the next three are views of the sheet's target
    positions: torch.Tensor
    lengths: torch.Tensor
    inputs: torch.Tensor
    states: StepStates | None
    batch: Any  # of the attention
    reserved: Reserved | None  # of the sampler
    links: Links | None  # of the chain
    unlinked: list[Array]  # the chain's inputs where no row follows drafts
    moving: tuple[int, ...]  # indices in the sheet of token ids, positions, KV slots, contexts
    adapters: ReservedTiles | None  # of the adapters
    images: RecordedImages | None  # of the pages


@dataclass(slots=True)
class Recording:
    """All graphs of a batch size."""

    memory: StepMemory
    steps: Mapping[StepKind, RecordedStep]  # one for each kind that is served
    masked: MaskedChoice | None
