"""Steps of decodes as recorded graphs: one replay in place of a launch per kernel.

A graph is recorded per batch size of `sizes`; a step takes the smallest that holds its rows, and
the places left over decode nothing: token 0 at position 0, its K and V in the null block. What a
step changes is copied into memory that stays where it is, the only one a graph reads. Where tokens
are chosen on the device, that is recorded as well: the whole step is one launch.
Where adapters are served, steps that have any have a recording of their own: the others launch
nothing for them. So have steps with rows that attend to images, where layers do.
Guesses are decodes, too: each reads the blocks of its sequence up to its own place. Where layers
keep states, the slots that a row reads and writes change like its blocks, and guesses follow one
another there: steps that have any are recorded as those with prompts are, beside these
(`mixed_graphs.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import torch

from tgi_trio.errors import ConfigurationError
from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.torch_backend.attention.interface import CapturableAttention
from tgi_trio.shard.torch_backend.kv_cache import KVCache
from tgi_trio.shard.torch_backend.recordings.carveouts import Carveouts
from tgi_trio.shard.torch_backend.recordings.decode_plans import (
    only_decodes,
    pad_plan,
    turning_position,
)
from tgi_trio.shard.torch_backend.recordings.mixed_plans import MixedSize, mixed_sizes
from tgi_trio.shard.torch_backend.recordings.recorded_steps import (
    Capture,
    CaptureError,
    Chosen,
    DecodeForward,
    Ends,
    IdleSteps,
    PagedImages,
    RecordedAdapters,
    RecordedStep,
    Recording,
    StepKind,
)
from tgi_trio.shard.torch_backend.recordings.step_recorder import StepRecorder
from tgi_trio.shard.torch_backend.sampling.choice_masks import Masks
from tgi_trio.shard.torch_backend.staging import Array, Staging
from tgi_trio.shard.torch_backend.states.pool import StatePool

if TYPE_CHECKING:  # they import Triton
    from tgi_trio.shard.torch_backend.recordings.mixed_graphs import MixedGraphs
    from tgi_trio.shard.torch_backend.sampling.device_sampler import (
        Found,
        Told,
    )


_PLAIN: Final = StepKind()


class DecodeGraphs:
    """The graphs of one model on one device."""

    def __init__(
        self,
        forward: DecodeForward,
        attention: CapturableAttention,
        capture: Capture,
        sizes: Sequence[int],
        device: torch.device,
        ends: Ends | None = None,
        adapters: RecordedAdapters | None = None,
        *,
        before: Callable[[IdleSteps, bool], None] | None = None,
        images: PagedImages | None = None,
        mixed: MixedGraphs | None = None,
        carveouts: Carveouts | None = None,
    ) -> None:
        """`sizes`: batch sizes to record, in any order; none: `forward` always returns None.

        `before` is called before any is, with what returns idle steps to measure and whether that
        is rehearsed: what it chooses is recorded. `images`: where layers attend to some. `mixed`:
        recorded behind these, and forgotten with them. `carveouts`: chosen behind `before`, where
        kernels can be told of any.
        """
        self.carveouts = carveouts
        self._mixed = mixed
        self._images = images
        self._adapters = adapters
        self._before = before
        self._attention = attention
        self._capture = capture
        self._sampler = None if ends is None else ends.sampler
        self._staging = Staging(device)
        self._recorder = StepRecorder(
            *(forward, attention, capture, device, ends, adapters, images, carveouts)
        )
        self.sizes = sorted(set(sizes))
        self._usable: list[int] = []
        self._width = 0  # of the block tables they were recorded with
        self._recorded: dict[int, Recording] = {}

    def forget(self) -> None:
        """Drop every recording: each holds on to the cache it was made over."""
        self._recorded, self._usable = {}, []
        self._recorder.forget()
        if self._mixed is not None:
            self._mixed.forget()

    def record(
        self,
        cache: KVCache,
        width: int,
        most: int | None = None,
        pool: StatePool | None = None,
        tokens: int = 0,
    ) -> None:
        """Record every size over `cache`, for block tables of up to `width` blocks.

        Steps have `most` rows; larger sizes than hold them are left out. The largest goes first:
        the smaller ones then live in its memory. `pool`: where the model keeps states. `tokens`:
        that a step with prompts has at most.

        Raises ConfigurationError where decodes cannot be recorded: launched, they would take many
        times as long, and whoever wants that can say so.
        """
        self.forget()
        sizes = self._sizes_for(most)
        try:
            self._choose_ahead(cache, width, pool, rehearses=False)
            if self.carveouts is not None:
                self._recorder.pool = pool
                self.carveouts.choose(sizes, lambda size: self._recorder.idle(size, cache, width))
            self._record_all(sizes, cache, width, pool)
        except CaptureError as error:
            self.forget()
            raise ConfigurationError(
                f"steps of this model cannot be recorded as CUDA graphs here: {error}. "
                "--cuda-graphs 0 serves without them."
            ) from error
        self._record_mixed(mixed_sizes(tokens, sizes, states=pool is not None), cache, width)

    def _sizes_for(self, most: int | None) -> list[int]:
        return self.sizes if most is None else self.sizes[: 1 + bisect_left(self.sizes, most)]

    def _record_all(
        self, sizes: list[int], cache: KVCache, width: int, pool: StatePool | None
    ) -> None:
        self.forget()
        self._recorder.pool = pool
        self._width = width
        record = self._recorder.record
        self._recorded = {size: record(size, cache, width) for size in reversed(sizes)}
        self._usable = sizes

    def _record_mixed(self, sizes: list[MixedSize], cache: KVCache, width: int) -> None:
        recorder = self._recorder
        if self._mixed is not None:
            self._mixed.record(cache, width, sizes, recorder.scores, recorder.pool)

    def rehearse(
        self,
        cache: KVCache,
        width: int,
        most: int | None = None,
        pool: StatePool | None = None,
        tokens: int = 0,
    ) -> None:
        """Run once what `record` records, at a few of the sizes: most of them launch the same."""
        sizes = self._sizes_for(most)
        few = sorted({*sizes[:2], *sizes[len(sizes) // 2 :][:1], *sizes[-1:]})
        mixed = mixed_sizes(tokens, sizes, states=pool is not None)
        with self._capture.rehearsing():
            # First, as what is launched by nothing else is: it compiles beside the rest.
            self._choose_ahead(cache, width, pool, rehearses=True)
            self._record_all(few, cache, width, pool)
            self._record_mixed([*mixed[:1], *mixed[1:][-1:]], cache, width)
        self.forget()

    def _choose_ahead(
        self, cache: KVCache, width: int, pool: StatePool | None, *, rehearses: bool
    ) -> None:
        """Have what is recorded chosen, by steps that decode nothing where it is measured so."""
        if self._before is None:
            return
        self._recorder.pool = pool
        self._before(lambda size: self._recorder.idle(size, cache, width), rehearses)

    def forward(self, plan: StepPlan, lengths: Array | None) -> torch.Tensor | None:
        """Return hidden states [T, hidden], valid until the next call; None: no graph fits.

        `lengths` int64 [T] as for `Model.forward`, None for one that reads none.
        """
        recorded = self.find(plan)
        if recorded is None:
            return None
        step = self._refill(recorded, plan, lengths, None)
        step.graph.replay()
        return step.hidden[: len(plan.token_ids)]

    def replay(self, plan: StepPlan, lengths: Array | None) -> bool:
        """Compute a step of decodes whose tokens another rank chooses; False: no graph fits."""
        return self.forward(plan, lengths) is not None

    def choose(
        self,
        recorded: Recording,
        plan: StepPlan,
        lengths: Array | None,
        told: Told | None,
        links: Sequence[Array] = (),
    ) -> Chosen | None:
        """Compute a step of decodes and choose all its rows' tokens; None: none is chosen here.

        `recorded`: what `find` returns of it. `told`: what `DeviceSampler.ask` returns for as many
        choices as that has; None: nothing is chosen, and the scores are as the model left them.
        `links`: what `DeviceChain.arrays` returns; none: it follows nothing.
        """
        sampler = self._sampler
        if sampler is None or recorded.memory.asked is None:
            return None
        rows = len(plan.token_ids)
        step = self._refill(recorded, plan, lengths, told, links)
        if step.chosen is None:
            return None
        sampler.refill_entries(recorded.memory.asked, told or recorded.memory.asked.idle)
        step.graph.replay()
        kind = (rows, told is not None, told is not None and told.widest > 0)
        if kind not in step.parts:
            step.parts[kind] = self._part(step.chosen, recorded.memory.size, *kind)
        return step.parts[kind]

    def repeat(
        self,
        recorded: Recording,
        plan: StepPlan,
        lengths: Array | None,
        told: Told | None,
        *,
        same: bool,
    ) -> None:
        """Do what `choose` did in the last step, of the same rows, inputs and block tables.

        What it chooses is left where that of the last step was. `same`: so is `told`.
        """
        adapted = self._adapters is not None and self._adapters.used
        if same and lengths is None and self._recorder.pool is None and not adapted:
            moved = plan.token_ids, turning_position(plan), plan.kv_slots, plan.context_lengths
            self._staging.fill_from(recorded.memory.sheet, moved, recorded.memory.moving)
            recorded.steps[_PLAIN].graph.replay()
            return
        step = self._refill(recorded, plan, lengths, told)
        if told is not None and self._sampler is not None and recorded.memory.asked is not None:
            self._sampler.refill_entries(recorded.memory.asked, told)
        step.graph.replay()

    @property
    def has_no_images(self) -> bool:
        """Whether no layer attends to images."""
        return self._images is None

    def _part(self, whole: Chosen, size: int, rows: int, chooses: bool, lists: bool) -> Chosen:
        """Return what is of the first rows of a recording's `size`."""
        found = None
        if chooses and whole.found is not None:
            found = whole.found.first(rows, lists=lists)
        hidden = self._recorder.hidden
        hidden = None if hidden is None else hidden[:rows]
        ids = None if whole.ids is None else whole.ids[:rows]
        return Chosen(whole.scores[:rows], found, hidden, size, ids)

    def choose_masked(self, size: int, told: Told, masks: Masks) -> Found:
        """Choose with masks from the scores of the last step, of the graph for `size` decodes.

        `told`: as for `choose`.
        """
        recorded, sampler = self._recorded[size], self._sampler
        if recorded.masked is None or sampler is None:
            raise RuntimeError("tokens are not chosen where this is recorded")
        sampler.refill(recorded.masked.asked, told)
        sampler.refill_masks(recorded.masked.masks, masks)
        recorded.masked.graph.replay()
        return recorded.masked.found.first(len(masks.green), lists=told.widest > 0)

    def find(self, plan: StepPlan) -> Recording | None:
        """Return the smallest graph that holds a step; None: none does."""
        place = bisect_left(self._usable, len(plan.token_ids))
        fits = place < len(self._usable) and plan.block_tables.shape[1] <= self._width
        if not fits or not (plan.decodes or only_decodes(plan)):
            return None
        found = self._recorded[self._usable[place]]
        own, adapters = found.memory.adapters, self._adapters
        if adapters is not None and own is not None and adapters.used and not adapters.fits(own):
            return None
        if self._images is not None and self._images.wants(plan) and not self._images.fits(plan):
            return None
        return found

    def _refill(
        self,
        recorded: Recording,
        plan: StepPlan,
        lengths: Array | None,
        told: Told | None,
        links: Sequence[Array] = (),
    ) -> RecordedStep:
        """Make what a graph reads that of `plan`; return which of them computes it.

        All of it but entries goes up in one copy: the device waits for each between two steps.
        """
        arrays = self._recorder.token_arrays(plan, lengths)
        arrays += links or recorded.memory.unlinked
        if recorded.memory.asked is not None:
            arrays += (told or recorded.memory.asked.idle).arrays
        arrays += self._attention.arrays(plan)
        self._staging.fill_from(recorded.memory.sheet, arrays)
        adapted = self._adapters is not None and self._adapters.used
        if self._adapters is not None and recorded.memory.adapters is not None and adapted:
            self._adapters.refill(recorded.memory.adapters)
        crossed = self._images is not None and self._images.wants(plan)
        if self._images is not None and recorded.memory.images is not None and crossed:
            self._images.refill(recorded.memory.images, pad_plan(plan, recorded.memory.size))
        return recorded.steps[StepKind(adapted, crossed) if adapted or crossed else _PLAIN]
