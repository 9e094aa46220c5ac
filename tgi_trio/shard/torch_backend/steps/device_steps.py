"""Steps of which nothing waits: launched, and read when the device is done.

A step's numbers go up from pinned memory, its tokens are chosen where its logits are and stay there
for the next step, and what was chosen comes down behind an event. So the step after it can be
launched before anybody knows its tokens (`StepPlan.inputs` says which they will be).

Steps with prompts are recordings as well, where they are small (`mixed_graphs.py`).

Where a choice needs the host between two tokens, for a grammar or a watermark, the model runs
first, and the choice follows once the tokens before are known (`Pending.proceed`): their masks are
made while the device computes. Each is a recording then, where decodes are recorded.
"""

from __future__ import annotations

import numpy as np
import torch

from tgi_trio.shard.contract import ShardSequence, StepPlan
from tgi_trio.shard.machine.accelerator import record_event
from tgi_trio.shard.machine.kv_sizing import DEFAULT_LENGTH
from tgi_trio.shard.speculation.hidden import LastStep
from tgi_trio.shard.torch_backend.guessing.device_chain import DeviceChain
from tgi_trio.shard.torch_backend.kv_cache import KVCache
from tgi_trio.shard.torch_backend.prompt_logprobs import PromptLogprobs, PromptSpan
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
from tgi_trio.shard.torch_backend.sampling.asking import Choosing, count_up
from tgi_trio.shard.torch_backend.sampling.choice_kernels import DeviceMasks
from tgi_trio.shard.torch_backend.sampling.choice_masks import ChoiceMasks
from tgi_trio.shard.torch_backend.sampling.device_sampler import (
    DeviceSampler,
    Found,
    Told,
)
from tgi_trio.shard.torch_backend.sampling.idle_choices import choose_idle
from tgi_trio.shard.torch_backend.staging import Array, PinnedPool
from tgi_trio.shard.torch_backend.states.pool import StatePool
from tgi_trio.shard.torch_backend.steps.launched_step import LaunchedStep
from tgi_trio.shard.torch_backend.steps.like_before import LikeBefore
from tgi_trio.shard.torch_backend.torch_device import without_gradients

_GONE = "gone"  # key in Sequence.state: it has left, whatever a step in flight says of it


class DeviceSteps:
    """Launches the steps of one model on one device."""

    serve = staticmethod(fits_device)

    def __init__(
        self,
        computes: StepForward,
        sampler: DeviceSampler,
        masks: ChoiceMasks,
        graphs: DecodeGraphs | None,
        last: LastStep | None = None,
        chain: DeviceChain | None = None,
        mixed: MixedGraphs | None = None,
    ) -> None:
        """`graphs` record what `computes` does, and the choice with it; `mixed`: with prompts.

        `last` is told what was guessed behind the choices of each step, where `sampler` guesses;
        `chain` is what `graphs` record of steps that follow one another with guesses.
        """
        self._mixed = mixed
        self._chain = chain
        self._judged = False  # the last step was a recording that guesses may follow
        self._pinned = PinnedPool()
        self._last = last
        self._computes = computes
        self._sampler = sampler
        self._masks = masks
        self._graphs = graphs
        self._all_here: list[ShardSequence] | None = None  # rows none of which has left
        self._again: LikeBefore | None = None  # what the next step may have in common with the last

    def chains(self, plan: StepPlan) -> bool:
        """Return whether the next step may follow guesses that nobody has read, as may this one.

        Only recordings judge them, and only where choices depend on nothing but their scores.
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
        # Lists of tokens and biases may be longer than recordings have room for.
        return plain and not settings.widest and not any(map(len, settings.biases))

    def launch(
        self,
        plan: StepPlan,
        lengths: Array | None,
        cache: KVCache,
        prompts: PromptLogprobs,
        pool: StatePool | None = None,
    ) -> LaunchedStep:
        """Begin a plan that `serve` accepts; `lengths` int64 [T] as for `Model.forward`, None
        for one that reads none.

        `pool`: where the model keeps states; that of the warm-up.
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
        spans: dict[int, PromptSpan] = {}
        landed = self._pinned.lend()
        if chosen is None:
            mixed = self._replay_mixed(plan, lengths, choosing, masked)
            if mixed is None:  # in the order in which other ranks do so, too
                hidden = self._computes.hidden(plan, lengths, cache, pool)
                spans = prompts.launch(plan, hidden, landed.keep)
                chosen = self._choose(plan, hidden, choosing, masked)
            else:
                spans = prompts.launch(plan, mixed.hidden, landed.keep)
                chosen = mixed.chosen
        step = LaunchedStep(
            *(settings.faults, len(plan.rows), sampled, choosing, settings.wanted),
            *(began, self._event),
            *(spans, landed),
        )
        if (last := self._last) is not None:
            step.note = lambda choices, guesses: last.keep_guesses(plan, sampled, choices, guesses)
        if chosen is not None and chosen.found is None:
            unchosen = chosen
            step.later = lambda launched: self._choose_later(launched, unchosen)
        else:
            if chosen is not None and chosen.found is not None:
                step.take(chosen.found)
                if plan.moves and chosen.ids is not None:
                    step.computed = landed.keep_array(chosen.ids)
            step.finish()
        return step

    def _launch_again(
        self, again: LikeBefore, plan: StepPlan, lengths: Array | None
    ) -> LaunchedStep | None:
        """Begin a step like the last one; None: what its rows ask for has no room in a recording.

        Nothing has been done then that must not be done again.
        """
        began, settings = self._event(), again.settings
        choosing, told = again.choices(plan), again.told
        same = told is not None or settings.masked
        if not same:
            told = self._sampler.ask(choosing, again.recorded.memory.size)
            if not self._sampler.fits(told):
                return None
        again.graphs.repeat(again.recorded, plan, lengths, told, same=same)
        step = LaunchedStep(
            settings.faults,
            len(plan.rows),
            again.sampled,
            choosing,
            settings.wanted,
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
        """Make no more masks for the sequence: steps in flight no longer concern it."""
        sequence.state[_GONE] = True
        self._all_here = None
        self._sampler.drop(sequence)
        if self._chain is not None:
            self._chain.drop(sequence)

    @property
    def looks_up(self) -> bool:
        """Whether n-grams are looked up in the recordings of steps."""
        return self._chain is not None and self._chain.looks_up

    def make_room(self, rows: int, positions: int) -> None:
        """Take what `rows` rows and `positions` positions need, before what is left is measured."""
        self._again = None  # its recording is to be forgotten
        self._computes.make_room(positions)
        rows = max(1, min(rows, MOST_CHOICES))
        self._sampler.make_room(rows)
        if self._chain is not None:
            self._chain.make_room(rows, positions or DEFAULT_LENGTH)

    def warm_up(self, cache: KVCache, most: int, pool: StatePool | None = None) -> None:
        """Run the kinds of steps that nobody has run yet: nothing is to compile while serving."""
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
        """Compute a step of decodes as a recording; None: there is none for it."""
        if self._graphs is None:
            return None
        decodes = plan if plan.decodes else as_decodes(plan)
        if decodes is None:
            return None
        recorded = self._graphs.find(decodes)
        if recorded is None:
            return None
        size = recorded.memory.size
        told = None if masked else self._sampler.ask(choosing, size)
        if told is not None and self._sampler.fits(told):
            links: list[Array] = []
            if self._chain is not None:
                settings = self._sampler.settings(choosing.rows)
                guesses = plan.leads or plan.moves or plan.drafts is not None
                self._judged = guesses and self.chains(plan)
                links = self._chain.arrays(plan, choosing, settings, leads=self._judged)
            chosen = self._graphs.choose(recorded, decodes, lengths, told, links)
            self._note(plan, choosing, recorded, told, chosen)
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
        told: Told | None,
        chosen: Chosen | None,
    ) -> None:
        """Note what a step that has been replayed has in common with those like it.

        Nothing where others have a word in each step: who guesses, and images.
        """
        alone = self._chain is None and self._last is None
        if self._graphs is None or not (plan.decodes and alone and self._graphs.has_no_images):
            return
        if chosen is not None:
            settings = self._sampler.settings(choosing.rows)
            own = told if told is not None and self._sampler.keeps(told) else None
            self._again = LikeBefore.of(
                plan, self._graphs, recorded, choosing, settings, own, chosen
            )

    def _replay_mixed(
        self, plan: StepPlan, lengths: Array | None, choosing: Choosing, masked: bool
    ) -> MixedStep | None:
        """Compute a step with prompts as a recording; None: there is none for it."""
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
        """Choose behind hidden states, or leave that for later; None: nobody does."""
        picked = self._computes.pick(plan, hidden)
        if picked is None:
            return None
        scores = self._computes.logits(picked)
        found = None if masked else self._choose_now(scores, picked, choosing)
        return Chosen(scores, found, picked)

    def _choose_now(
        self, scores: torch.Tensor, hidden: torch.Tensor | None, choosing: Choosing
    ) -> Found:
        return self._choose_told(scores, hidden, self._sampler.ask(choosing))

    def _choose_told(
        self,
        scores: torch.Tensor,
        hidden: torch.Tensor | None,
        told: Told,
        masks: DeviceMasks | None = None,
    ) -> Found:
        """Choose what `told` asks for, kernel by kernel."""
        found = self._sampler.choose(scores, self._sampler.upload(told), masks, hidden)
        return found.first(len(scores), lists=told.widest > 0)

    def _choose_later(self, step: LaunchedStep, unchosen: Chosen) -> None:
        """Choose with masks; every token before is known."""
        choosing, scores, size = step.choosing, unchosen.scores, unchosen.size
        choosing.unknown = None
        masks = self._masks.make(choosing, self._find_gone(choosing.rows))
        step.faults = masks.faults
        told = self._sampler.ask(choosing, size or None)
        with without_gradients():
            if self._graphs is not None and size and self._sampler.fits(told):
                found = self._graphs.choose_masked(size, told, masks)
            else:
                if size:
                    told = self._sampler.ask(choosing)
                here = self._sampler.upload_masks(masks)
                found = self._choose_told(scores, unchosen.hidden, told, here)
            step.take(found)
            step.finish()

    def _find_gone(self, rows: list[ShardSequence]) -> list[int]:
        """Return which of the rows have left; looked for again once any sequence has."""
        if rows is self._all_here:
            return []
        gone = [place for place, row in enumerate(rows) if _GONE in row.state]
        self._all_here = None if gone else rows
        return gone

    def _event(self) -> torch.Event:
        return record_event(self._computes.device, timed=True)
