"""Steps that are launched without waiting for the device, and read when it is done.

A step's inputs are uploaded from pinned memory. Its tokens are chosen on the device and stay there
for the next step; a copy of them comes down to pinned memory, followed by an event. So the next
step can be launched before the host knows its tokens (`StepPlan.inputs` says where they will be).
Decode steps and small steps with prompts (`mixed_graphs.py`) are replays of CUDA graphs.

A grammar or a watermark needs the host between two tokens, and so does a gap to be filled
(`device_gaps.py`). There the model is launched first and the choice follows once the tokens before
it are known (`Pending.proceed`); the masks are made while the device computes. Where decodes are
recorded, each of the two is a replay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch

from tgi_trio.shard.contract import ShardSequence, StepPlan
from tgi_trio.shard.machine.accelerator import record_event
from tgi_trio.shard.machine.kv_sizing import DEFAULT_LENGTH
from tgi_trio.shard.speculation.hidden import LastStep
from tgi_trio.shard.torch_backend.drafting.device_chain import DeviceChain
from tgi_trio.shard.torch_backend.kv_cache import KVCache
from tgi_trio.shard.torch_backend.prompt_logprobs import PromptLogprobs
from tgi_trio.shard.torch_backend.recordings.decode_graphs import DecodeGraphs
from tgi_trio.shard.torch_backend.recordings.decode_plans import as_decodes
from tgi_trio.shard.torch_backend.recordings.mixed_graphs import MixedGraphs, MixedStep
from tgi_trio.shard.torch_backend.recordings.recorded_steps import (
    Chosen,
    Recording,
)
from tgi_trio.shard.torch_backend.recordings.step_forward import (
    MOST_CHOICES,
    StepForward,
    fits_device,
    idle_steps,
)
from tgi_trio.shard.torch_backend.sampling.choice_kernels import DeviceMasks
from tgi_trio.shard.torch_backend.sampling.choice_masks import ChoiceMasks
from tgi_trio.shard.torch_backend.sampling.choice_settings import Choosing, count_up
from tgi_trio.shard.torch_backend.sampling.device_gaps import ChosenInGaps
from tgi_trio.shard.torch_backend.sampling.device_sampler import (
    DeviceSampler,
    Found,
    HostInputs,
)
from tgi_trio.shard.torch_backend.sampling.idle_choices import choose_idle
from tgi_trio.shard.torch_backend.staging import Array, PinnedPool
from tgi_trio.shard.torch_backend.states.pool import StatePool
from tgi_trio.shard.torch_backend.steps.launched_step import LaunchedStep
from tgi_trio.shard.torch_backend.steps.like_before import LikeBefore
from tgi_trio.shard.torch_backend.torch_device import without_gradients

# `choose_in_gaps` with its sampler.
ChoosingInGaps: TypeAlias = Callable[[Choosing, torch.Tensor], ChosenInGaps | None]
_GONE = "gone"  # key in Sequence.state: the sequence has left, though a step may still have a row


class DeviceSteps:
    """Launches the steps of one model on one device."""

    serve = staticmethod(fits_device)

    def __init__(
        self,
        computes: StepForward,
        sampler: DeviceSampler,
        masks: ChoiceMasks,
        gaps: ChoosingInGaps,
        graphs: DecodeGraphs | None,
        last: LastStep | None = None,
        chain: DeviceChain | None = None,
        mixed: MixedGraphs | None = None,
    ) -> None:
        """`graphs`: recordings of what `computes` launches, with the choice; `mixed`: of prompts.

        `last`: told of the drafts after each choice, where `sampler` drafts; `chain`: part of
        `graphs` where a step can follow drafts that nobody has read.
        """
        self._mixed = mixed
        self._chain = chain
        self._judged = False  # the last step was a recording that judged its drafts on the device
        self._pinned = PinnedPool()
        self._last = last
        self._computes = computes
        self._sampler = sampler
        self._masks = masks
        self._gaps = gaps
        self._graphs = graphs
        self._all_here: list[ShardSequence] | None = None  # rows, none of which has left
        self._again: LikeBefore | None = None  # how the last step was launched, to be repeated

    def chains(self, plan: StepPlan) -> bool:
        """Return whether this step can be launched, and followed, before its drafts are read.

        The device judges drafts only in recordings, and only where a choice depends on its scores
        alone.
        """
        if self._graphs is None or self._chain is None:
            return False
        decodes = as_decodes(plan)
        if decodes is None or plan.rotary_positions is not None or not self._chain.holds(plan):
            return False
        settings = self._sampler.settings(plan.rows)
        if self._graphs.find(decodes) is None or settings.masked:
            return False
        plain = not settings.penalised and not any(row.min_remaining for row in plan.rows)
        # Recordings have room for a limited number of top tokens and biases.
        return plain and not settings.widest and not any(map(len, settings.biases))

    def launch(
        self,
        plan: StepPlan,
        lengths: Array | None,
        cache: KVCache,
        prompts: PromptLogprobs,
        pool: StatePool | None = None,
    ) -> LaunchedStep:
        """Launch a plan that `serve` accepts.

        `lengths`: int64 [T] as for `Model.forward`; None for a model that does not read them.
        `pool`: given where the model keeps states, as for the warm-up.
        """
        again, self._again = self._again, None
        if again is not None and again.fits(plan):
            step = self._launch_again(again, plan, lengths)
            if step is not None:
                return step
        began = self._event()
        sampled = count_up(len(plan.rows)) if plan.decodes else np.flatnonzero(plan.samples)
        choosing = Choosing.of(plan, sampled)
        settings = self._sampler.settings(choosing.rows)
        masked = settings.masked
        followed, self._judged = self._judged, False
        chosen = self._replay(plan, lengths, choosing, masked)
        if plan.moves and not (followed and self._judged):
            raise RuntimeError("a step has moved rows, and no recording to move them in")
        landed = self._pinned.lend()
        if chosen is not None:  # prompts of a token are computed as decodes are
            spans = prompts.begin(plan)
        else:
            mixed = self._replay_mixed(plan, lengths, choosing, masked)
            if mixed is None:  # the order of collectives is the same on all ranks
                hidden = self._computes.hidden(plan, lengths, cache, pool)
                spans = prompts.launch(plan, hidden, landed.keep)
                chosen = self._choose(plan, hidden, choosing, masked)
            else:
                spans = prompts.launch(plan, mixed.hidden, landed.keep)
                chosen = mixed.chosen
        step = LaunchedStep(
            refused=settings.faults,
            rows=len(plan.rows),
            sampled=sampled,
            choosing=choosing,
            top_counts=settings.top_counts,
            began=began,
            event=self._event,
            prompts=spans,
            landed=landed,
        )
        if (last := self._last) is not None:
            step.note = lambda choices, drafts: last.keep_drafts(plan, sampled, choices, drafts)
        self._take_choice(step, chosen, moves=plan.moves)
        return step

    def _take_choice(self, step: LaunchedStep, chosen: Chosen | None, *, moves: bool) -> None:
        """Have a step take what was chosen, if anything, or choose it later."""
        if chosen is not None and chosen.found is None:
            step.later = lambda launched: self._choose_later(launched, chosen)
            return
        if chosen is not None and chosen.found is not None:
            step.take(chosen.found)
            if moves and chosen.ids is not None:
                step.computed = step.landed.keep_array(chosen.ids)
        step.finish()

    def _launch_again(
        self, again: LikeBefore, plan: StepPlan, lengths: Array | None
    ) -> LaunchedStep | None:
        """Launch a step like the last one; None if the sampler's inputs exceed the recording.

        In that case nothing has been done that must not be done twice.
        """
        began, settings = self._event(), again.settings
        choosing, host_inputs = again.choices(plan), again.host_inputs
        same = host_inputs is not None or settings.masked
        if not same:
            host_inputs = self._sampler.make_inputs(choosing, again.recorded.memory.size)
            if not self._sampler.fits(host_inputs):
                return None
        again.graphs.repeat(again.recorded, plan, lengths, host_inputs, same=same)
        step = LaunchedStep(
            settings.faults,
            len(plan.rows),
            again.sampled,
            choosing,
            settings.top_counts,
            began,
            self._event,
            {},
            self._pinned.lend(),
        )
        if again.chosen.found is None:
            unchosen = again.chosen
            step.later = lambda launched: self._choose_later(launched, unchosen)
        else:
            step.take(again.chosen.found)
            step.finish()
        self._again = again
        return step

    def drop(self, sequence: ShardSequence) -> None:
        """Make no more masks for a sequence that has left, and free its slots."""
        sequence.state[_GONE] = True
        self._all_here = None
        self._sampler.drop(sequence)
        if self._chain is not None:
            self._chain.drop(sequence)

    @property
    def looks_up(self) -> bool:
        """Whether recorded steps look up n-grams."""
        return self._chain is not None and self._chain.looks_up

    def make_room(self, rows: int, positions: int) -> None:
        """Allocate what so many rows and positions need, before free memory is measured."""
        self._again = None  # its recording will be forgotten
        self._computes.make_room(positions)
        rows = max(1, min(rows, MOST_CHOICES))
        self._sampler.make_room(rows)
        if self._chain is not None:
            self._chain.make_room(rows, positions or DEFAULT_LENGTH)

    def warm_up(self, cache: KVCache, most: int, pool: StatePool | None = None) -> None:
        """Run the kinds of steps that no recording has run, so that serving compiles nothing."""
        for plan in idle_steps(most):
            count = len(plan.context_lengths)
            plan.samples = np.ones(count, np.bool_)
            ones = np.ones(len(plan.token_ids), np.int64)
            scores = self._computes.scores(plan, self._computes.hidden(plan, ones, cache, pool))
            if scores is not None:
                choose_idle(self._sampler, self._masks, scores[:1])

    def _replay(
        self, plan: StepPlan, lengths: Array | None, choosing: Choosing, masked: bool
    ) -> Chosen | None:
        """Replay a step of decodes; None if no recording fits."""
        if self._graphs is None:
            return None
        decodes = plan if plan.decodes else as_decodes(plan)
        if decodes is None:
            return None
        recorded = self._graphs.find(decodes)
        if recorded is None:
            return None
        size = recorded.memory.size
        host_inputs = None if masked else self._sampler.make_inputs(choosing, size)
        if host_inputs is not None and self._sampler.fits(host_inputs):
            links: list[Array] = []
            if self._chain is not None:
                settings = self._sampler.settings(choosing.rows)
                drafts = plan.leads or plan.moves or plan.drafts is not None
                self._judged = drafts and self.chains(plan)
                links = self._chain.arrays(plan, choosing, settings, leads=self._judged)
            chosen = self._graphs.choose(recorded, decodes, lengths, host_inputs, links)
            self._note(plan, choosing, recorded, host_inputs, chosen)
            return chosen
        chosen = self._graphs.choose(recorded, decodes, lengths, None)
        if chosen is None or masked:
            self._note(plan, choosing, recorded, None, chosen)
            return chosen
        found = self._choose_now(chosen.scores, chosen.hidden, choosing)
        return Chosen(chosen.scores, found, chosen.hidden)

    def _note(
        self,
        plan: StepPlan,
        choosing: Choosing,
        recorded: Recording,
        host_inputs: HostInputs | None,
        chosen: Chosen | None,
    ) -> None:
        """Remember how a step was launched, for later ones like it.

        Not where drafters or images change something in each step.
        """
        alone = self._chain is None and self._last is None
        if self._graphs is None or not (plan.decodes and alone and self._graphs.has_no_images):
            return
        if chosen is not None:
            settings = self._sampler.settings(choosing.rows)
            own = (
                host_inputs
                if host_inputs is not None and self._sampler.keeps(host_inputs)
                else None
            )
            self._again = LikeBefore.of(
                plan, self._graphs, recorded, choosing, settings, own, chosen
            )

    def _replay_mixed(
        self, plan: StepPlan, lengths: Array | None, choosing: Choosing, masked: bool
    ) -> MixedStep | None:
        """Replay a step with prompts; None if no recording fits."""
        if self._mixed is None:
            return None
        step = self._mixed.launch(plan, lengths, choosing, masked=masked)
        if step is None or step.chosen is None or step.chosen.found is not None or masked:
            return step
        scores, picked = step.chosen.scores, step.chosen.hidden
        found = self._choose_now(scores, picked, choosing)
        return MixedStep(step.hidden, Chosen(scores, found, picked))

    def _choose(
        self, plan: StepPlan, hidden: torch.Tensor, choosing: Choosing, masked: bool
    ) -> Chosen | None:
        """Choose from hidden states, or leave that for later; None if no row chooses."""
        picked = self._computes.pick(plan, hidden)
        if picked is None:
            return None
        scores = self._computes.logits(picked)
        found = None if masked else self._choose_now(scores, picked, choosing)
        return Chosen(scores, found, picked)

    def _choose_now(
        self, scores: torch.Tensor, hidden: torch.Tensor | None, choosing: Choosing
    ) -> Found:
        return self._choose_by_inputs(scores, hidden, self._sampler.make_inputs(choosing))

    def _choose_by_inputs(
        self,
        scores: torch.Tensor,
        hidden: torch.Tensor | None,
        host_inputs: HostInputs,
        masks: DeviceMasks | None = None,
    ) -> Found:
        """Launch the choice that `host_inputs` describes, kernel by kernel."""
        found = self._sampler.choose(scores, self._sampler.upload(host_inputs), masks, hidden)
        return found.first(len(scores), lists=host_inputs.widest > 0)

    def _choose_later(self, step: LaunchedStep, unchosen: Chosen) -> None:
        """Choose with masks, now that all earlier tokens are known."""
        choosing, scores, size = step.choosing, unchosen.scores, unchosen.size
        choosing.unknown, choosing.gone = None, self._find_gone(choosing.rows)
        masks = self._masks.make(choosing)
        step.faults = masks.faults
        host_inputs = self._sampler.make_inputs(choosing, size or None)
        with without_gradients():
            # First: a choice may write its edits over the scores.
            in_gaps = self._gaps(choosing, scores)
            if self._graphs is not None and size and self._sampler.fits(host_inputs):
                found = self._graphs.choose_masked(size, host_inputs, masks)
            else:
                if size:
                    host_inputs = self._sampler.make_inputs(choosing)
                here = self._sampler.upload_masks(masks)
                found = self._choose_by_inputs(scores, unchosen.hidden, host_inputs, here)
            if in_gaps is not None:
                in_gaps.put(found, self._sampler.chosen)
                step.faults = step.faults | in_gaps.faults
            step.take(found)
            step.finish()

    def _find_gone(self, rows: list[ShardSequence]) -> list[int]:
        """Return which of the rows have left; scanned again only after a sequence has left."""
        if rows is self._all_here:
            return []
        gone = [place for place, row in enumerate(rows) if _GONE in row.state]
        self._all_here = None if gone else rows
        return gone

    def _event(self) -> torch.Event:
        return record_event(self._computes.device, timed=True)
