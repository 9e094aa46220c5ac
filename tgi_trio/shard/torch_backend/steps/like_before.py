"""What a step of decodes has in common with the last one, where only the place of rows differs.

Rows that go on together ask for the same, have the same recording and the same blocks for many
steps: nothing of that is looked at again while it is the same lists and arrays, which nobody may
write to.
"""

from __future__ import annotations

from dataclasses import dataclass

from tgi_trio.shard.contract import ShardSequence, StepPlan
from tgi_trio.shard.torch_backend.recordings.decode_graphs import DecodeGraphs
from tgi_trio.shard.torch_backend.recordings.recorded_steps import Chosen, Recording
from tgi_trio.shard.torch_backend.sampling.asking import Choosing, Settings
from tgi_trio.shard.torch_backend.sampling.device_sampler import Told
from tgi_trio.shard.torch_backend.staging import Array


@dataclass(frozen=True, slots=True)
class LikeBefore:
    """How the last step was launched, as far as the next one may be launched like it."""

    rows: list[ShardSequence]
    inputs: Array | None
    tables: Array
    graphs: DecodeGraphs
    recorded: Recording
    sampled: Array  # those of the rows that choose: all
    aheads: Array  # no row's guesses
    settings: Settings
    told: Told | None  # None: what rows ask for depends on where they are, or comes later
    chosen: Chosen  # where the recording leaves what it chooses

    @classmethod
    def of(
        cls,
        plan: StepPlan,
        graphs: DecodeGraphs,
        recorded: Recording,
        choosing: Choosing,
        settings: Settings,
        told: Told | None,
        chosen: Chosen,
    ) -> LikeBefore:
        """Return it of a plan of decodes, all of which choose."""
        return cls(
            *(plan.rows, plan.inputs, plan.block_tables, graphs, recorded),
            *(choosing.owners, choosing.aheads, settings, told, chosen),
        )

    def fits(self, plan: StepPlan) -> bool:
        """Return whether a plan differs in nothing but where its rows are."""
        return (
            plan.rows is self.rows
            and plan.inputs is self.inputs
            and plan.block_tables is self.tables
            and plan.decodes
        )

    def choices(self, plan: StepPlan) -> Choosing:
        """Return what `Choosing.of` does of such a plan."""
        every = self.sampled
        return Choosing(plan.rows, every, self.aheads, plan.context_lengths, every, plan.inputs)
