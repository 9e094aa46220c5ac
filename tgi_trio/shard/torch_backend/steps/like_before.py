"""How a step of decodes can be launched like the last one, where only positions have moved.

The same rows keep their sampling parameters, recording and blocks for many steps. None of that is
looked at again as long as the plan has the same list and array objects, which nobody may write to.
"""

from __future__ import annotations

from dataclasses import dataclass

from tgi_trio.shard.contract import ShardSequence, StepPlan
from tgi_trio.shard.torch_backend.recordings.decode_graphs import DecodeGraphs
from tgi_trio.shard.torch_backend.recordings.recorded_steps import Chosen, Recording
from tgi_trio.shard.torch_backend.sampling.choice_settings import ChoiceSettings, Choosing
from tgi_trio.shard.torch_backend.sampling.device_sampler import HostInputs
from tgi_trio.shard.torch_backend.staging import Array


@dataclass(frozen=True, slots=True)
class LikeBefore:
    """How the last step was launched, for the next one to repeat it."""

    rows: list[ShardSequence]
    inputs: Array | None
    tables: Array
    graphs: DecodeGraphs
    recorded: Recording
    sampled: Array  # the rows that choose: all of them
    aheads: Array  # how far each choice is ahead of its row: 0, as there are no drafts
    settings: ChoiceSettings
    host_inputs: HostInputs | None  # None: it depends on positions, or the choice is made later
    chosen: Chosen  # the memory in which the recording leaves its choice

    @classmethod
    def of(
        cls,
        plan: StepPlan,
        graphs: DecodeGraphs,
        recorded: Recording,
        choosing: Choosing,
        settings: ChoiceSettings,
        host_inputs: HostInputs | None,
        chosen: Chosen,
    ) -> LikeBefore:
        """Return it for a plan of decodes, all of which choose."""
        return cls(
            plan.rows,
            plan.inputs,
            plan.block_tables,
            graphs,
            recorded,
            choosing.owners,
            choosing.aheads,
            settings,
            host_inputs,
            chosen,
        )

    def fits(self, plan: StepPlan) -> bool:
        """Return whether a plan differs from the last one only in its rows' positions."""
        return (
            plan.rows is self.rows
            and plan.inputs is self.inputs
            and plan.block_tables is self.tables
            and plan.decodes
        )

    def choices(self, plan: StepPlan) -> Choosing:
        """Return what `Choosing.of` would return for such a plan."""
        every = self.sampled
        return Choosing(plan.rows, every, self.aheads, plan.context_lengths, every, plan.inputs)
