"""Which layers each rank of a pipeline computes, and whether a model can be cut between layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.model.specs.t5 import T5Spec


@dataclass(frozen=True, slots=True)
class Run:
    """A rank's part of a pipeline."""

    layers: range
    is_first: bool = True  # it has the embedding; else it receives hidden states
    is_last: bool = True  # it has the last norm and the head; else it sends hidden states


@dataclass(frozen=True, slots=True)
class Stage:
    """A rank's place in a pipeline of `size` stages, each of `width` ranks with successive numbers.

    Rank 0 chooses tokens, so its stage is the last; the first stage receives its plans. If a stage
    has several ranks, each has a portion of every layer (tensor parallelism), and hidden states are
    sent from each to its counterpart in the next stage.
    """

    rank: int
    size: int
    width: int = 1

    @classmethod
    def of(cls, rank: int, ranks: int, stages: int) -> Stage:
        """Return the place of one of `ranks` ranks, whose number `stages` divides."""
        return cls(rank, stages, ranks // stages)

    @property
    def number(self) -> int:
        """The number of its stage in the order of ranks: 0 is the last stage, 1 the first."""
        return self.rank // self.width

    @property
    def place(self) -> int:
        """The number of the rank within its stage."""
        return self.rank % self.width

    @property
    def index(self) -> int:
        """The number of stages before this one."""
        return (self.number - 1) % self.size

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.number == 0

    @property
    def before(self) -> int:
        """The rank whose hidden states this one receives."""
        return (self.rank - self.width) % (self.size * self.width)

    @property
    def after(self) -> int:
        """The rank that receives this one's hidden states."""
        return (self.rank + self.width) % (self.size * self.width)

    def layers(self, work: Sequence[int], head: int) -> range:
        """Return this stage's layers, given each layer's `work` and that of the `head`, at the end.

        A pipeline is as fast as its slowest stage, whose work is minimised; what cannot be divided
        evenly goes to the first stages.
        """
        ends = _cut(work, head, self.size)
        return range(ends[self.index - 1] if self.index else 0, ends[self.index])


def _cut(work: Sequence[int], head: int, size: int) -> list[int]:
    """Return where each of `size` stages ends; each has at least one layer."""
    low, high = max(*work, work[-1] + head), sum(work) + head
    while low < high:  # bisection: with more room per stage there are never more stages
        middle = (low + high) // 2
        ends = _fill(work, size, middle)
        if sum(work[ends[-2] if size > 1 else 0 :]) + head <= middle:
            high = middle
        else:
            low = middle + 1
    return _fill(work, size, low)


def _fill(work: Sequence[int], size: int, most: int) -> list[int]:
    """Return where stages end if each but the last gets as many layers as `most` allows.

    At least one layer is left for each later stage; the last gets the rest.
    """
    ends, end = [], 0
    for left in reversed(range(1, size)):
        room = most
        while end < len(work) - left and (room := room - work[end]) >= 0:
            end += 1
        ends.append(end)
    return [*ends, len(work)]


def check_stages(spec: DecoderSpec | T5Spec, stages: int) -> None:
    """Raise ModelLoadError if a model cannot be cut into this many stages."""
    if not isinstance(spec, DecoderSpec):
        raise ModelLoadError(
            "A model with an encoder is not cut into stages; use --num-shard without "
            "--pipeline-stages."
        )
    needs_more = any(
        each.reads_layer is not None
        or each.shared
        or each.cross_attention
        or each.later
        or not each.chooses
        for each in spec.layers
    )
    several = spec.streams or spec.hyper or spec.gated_streams
    if several or spec.per_layer_inputs or needs_more:
        raise ModelLoadError(
            f"Model type {spec.family!r} has layers that need more of others than a hidden state, "
            "so it is not cut into stages; use --num-shard without --pipeline-stages."
        )
    if len(spec.layers) < stages:
        raise ModelLoadError(
            f"{len(spec.layers)} layers cannot be cut into {stages} stages; choose a smaller "
            "--pipeline-stages."
        )
