"""Which layers each rank of a pipeline computes, and whether a model can be cut between layers."""

from __future__ import annotations

from dataclasses import dataclass

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.spec import DecoderSpec
from tgi_trio.model.t5_spec import T5Spec


@dataclass(frozen=True, slots=True)
class Stage:
    """A rank's place in a pipeline of `size` stages.

    Rank 0 chooses tokens, so it is the last stage; what it plans reaches the first one beside it.
    """

    rank: int
    size: int

    @property
    def index(self) -> int:
        """How many stages come before this one."""
        return (self.rank - 1) % self.size

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.rank == 0

    @property
    def before(self) -> int:
        """The rank whose hidden states this one goes on with."""
        return (self.rank - 1) % self.size

    @property
    def after(self) -> int:
        """The rank that goes on with this one's."""
        return (self.rank + 1) % self.size

    def layers(self, count: int) -> range:
        """Return its run of `count` layers; what cannot be shared out is the first stages'.

        So rank 0, which has the head as well, never has more than another.
        """
        each, more = divmod(count, self.size)
        start = self.index * each + min(self.index, more)
        return range(start, start + each + (self.index < more))


def check_stages(spec: DecoderSpec | T5Spec, stages: int) -> None:
    """Raise ModelLoadError when a model cannot be cut into so many stages."""
    if not isinstance(spec, DecoderSpec):
        raise ModelLoadError(
            "A model with an encoder is not cut into stages; use --num-shard without "
            "--pipeline-stages."
        )
    needs_more = any(each.reads_layer is not None or each.shared for each in spec.layers)
    if spec.streams or spec.own_inputs or needs_more:
        raise ModelLoadError(
            f"Model type {spec.family!r} has layers that need more of others than a hidden state, "
            "so it is not cut into stages; use --num-shard without --pipeline-stages."
        )
    if len(spec.layers) < stages:
        raise ModelLoadError(
            f"{len(spec.layers)} layers cannot be cut into {stages} stages; choose a smaller "
            "--pipeline-stages."
        )
