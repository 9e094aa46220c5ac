"""Steps of which nothing waits: launched, and read when the device is done.

A step's numbers go up from pinned memory, its tokens are chosen where its logits are and stay there
for the next step, and what was chosen comes down behind an event. So the step after it can be
launched before anybody knows its tokens (`StepPlan.inputs` says which they will be).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from tgi_trio.ipc.messages import SamplingParameters
from tgi_trio.shard.contract import Choices, ShardSequence, StepPlan, StepResult, prompt_spans
from tgi_trio.shard.torch_backend.attention.interface import AttentionBackend
from tgi_trio.shard.torch_backend.decode_graphs import (
    Chosen,
    DecodeForward,
    DecodeGraphs,
    fill_in,
    idle_plan,
)
from tgi_trio.shard.torch_backend.kv_cache import KVCache
from tgi_trio.shard.torch_backend.sampling.device_sampler import (
    BestTokens,
    DeviceSampler,
    Rows,
    list_best,
    serves,
)
from tgi_trio.shard.torch_backend.staging import Array, Staging


class DeviceSteps:
    """Launches the steps of one model on one device."""

    def __init__(
        self,
        forward: DecodeForward,
        logits: Callable[[torch.Tensor], torch.Tensor],
        attention: AttentionBackend,
        sampler: DeviceSampler,
        graphs: DecodeGraphs | None,
        device: torch.device,
    ) -> None:
        """`forward` and `logits` are the model's."""
        self._forward = forward
        self._logits = logits
        self._attention = attention
        self._sampler = sampler
        self._graphs = graphs
        self._device = device
        self._staging = Staging(device)
        self._row_staging = Staging(device)

    def serve(self, plan: StepPlan) -> bool:
        """Return whether nothing in the plan needs the host before the step after it."""
        return (
            plan.drafts is None
            and len(plan.rows) <= self._sampler.most_rows
            and serves(plan.rows)
            and not prompt_spans(plan)
        )

    def launch(self, plan: StepPlan, lengths: Array, cache: KVCache) -> LaunchedStep:
        """Begin a plan that `serve` accepts; `lengths` int64 [T] as for `Model.forward`."""
        began = self._event()
        sampled = np.flatnonzero(plan.samples)
        chosen = None
        if self._graphs is not None and len(sampled) == len(plan.rows):
            chosen = self._graphs.choose(plan, lengths)
        if chosen is None:
            chosen = self._compute(plan, lengths, cache, sampled)
        rows = Rows(
            [plan.rows[i] for i in sampled.tolist()], plan.context_lengths[sampled].astype(np.int64)
        )
        if chosen is None:
            return LaunchedStep(self._sampler, len(plan.rows), sampled, rows, began, self._event())
        best = self._sampler.best(chosen.scores, rows.sequences)
        step = LaunchedStep(self._sampler, len(plan.rows), sampled, rows, began, began)
        step.take(chosen.found, best)
        step.done = self._event()
        return step

    def warm_up(self, cache: KVCache, most: int) -> None:
        """Run the kinds of steps that nobody has run yet, so that nothing compiles while serving.

        Decodes are divided in other ways by their number, up to `most` rows; recordings have run
        them all. Steps with a prefill are alike, and the largest has been run.
        """
        rows = 1
        while rows <= most and self._graphs is None:
            self._run_idle(idle_plan(rows, 1), cache)
            rows *= 2

    def _run_idle(self, plan: StepPlan, cache: KVCache) -> None:
        """Compute decodes of nothing and choose what follows them."""
        count, nobody = len(plan.token_ids), SamplingParameters()
        row = ShardSequence(-1, np.zeros(1, np.int32), 1, 1, 0, [], 1, 0, nobody)
        sampled = np.arange(count)
        plan.rows = [row] * count
        self._compute(plan, plan.context_lengths.astype(np.int64), cache, sampled)

    def _compute(
        self, plan: StepPlan, lengths: Array, cache: KVCache, sampled: Array
    ) -> Chosen | None:
        """Compute a step without a recording; None: it chooses nothing."""
        inputs = np.empty(0, np.int32) if plan.inputs is None else plan.inputs
        ids, positions, every, unknown = self._staging.upload(
            [plan.token_ids, plan.positions, lengths, inputs]
        )
        if plan.inputs is not None:
            ids = fill_in(ids, unknown, self._sampler.chosen)
        batch = self._attention.prepare(plan, cache)
        hidden = self._forward(ids, positions, every, self._attention, batch)
        if len(sampled) == 0:
            return None
        ends = plan.query_starts[1:][sampled].astype(np.int64) - 1
        if len(ends) < len(hidden):
            (places,) = self._row_staging.upload([ends])
            hidden = hidden.index_select(0, places)
        scores = self._logits(hidden)
        told = self._sampler.ask(
            [plan.rows[i] for i in sampled.tolist()],
            plan.context_lengths[sampled].astype(np.int64),
            None if plan.inputs is None else plan.inputs[ends],
            sampled.astype(np.int64),
        )
        return Chosen(scores, self._sampler.choose(scores, self._sampler.upload(*told)))

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


@dataclass(slots=True)
class LaunchedStep:
    """See `Pending`: what has been launched, and the memory its result comes down to."""

    sampler: DeviceSampler
    rows: int
    sampled: Array
    asked: Rows
    began: torch.cuda.Event
    done: torch.cuda.Event
    found: torch.Tensor | None = None  # float64 [S, 3], pinned
    best: BestTokens | None = field(default=None)  # pinned

    def take(self, found: torch.Tensor, best: BestTokens | None) -> None:
        """Have the result copied down; `done` is to be recorded behind it."""
        self.found = found.to("cpu", non_blocking=True)  # pinned, as nothing waits for the copy
        if best is not None:
            self.best = BestTokens(
                best.rows,
                best.values.to("cpu", non_blocking=True),
                best.ids.to("cpu", non_blocking=True),
            )

    def result(self) -> StepResult:
        """Wait for the device; the duration is its own, choosing included."""
        self.done.synchronize()
        took = int(self.began.elapsed_time(self.done) * 1e6)
        if self.found is None:
            return StepResult(Choices.none(self.rows), took, 0)
        tops = {}
        if self.best is not None:
            values, ids = self.best.values.numpy(), self.best.ids.numpy()
            tops = list_best(self.asked, self.best.rows, values, ids)
        choices = self.sampler.choices(self.found.numpy(), tops, self.asked)
        return StepResult(choices.spread(self.sampled, self.rows), took, 0)
