"""Decode steps recorded as CUDA graphs: one replay replaces one launch per kernel.

One graph is captured for each batch size of `sizes`. A step uses the smallest one that holds its
rows; the rows left over are padding: token 0 at position 0, with its K and V written to the null
block. A graph reads only memory that does not move, and the inputs of a step are copied there.
Where tokens are chosen on the device, the choice is captured too, so the whole step is one launch.

Where adapters are served, steps that use any replay a recording of their own, so that the other
steps launch nothing for them. The same holds for steps with rows that attend to images.

Drafts (speculative tokens) are rows of their own: each attends to its sequence's blocks up to its
own position. Where layers keep states, the state slots that a row reads and writes are inputs, like
its blocks. There drafts must be computed one after another, so steps with drafts are recorded
like steps with prompts (`mixed_graphs.py`).
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
    rotary_position,
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
        HostInputs,
    )


_PLAIN: Final = StepKind()


class DecodeGraphs:
    """The recorded decode steps of one model on one device."""

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
        """`sizes`: batch sizes to record, in any order; if empty, `forward` always returns None.

        `before` is called before anything is recorded, with a function that returns idle steps of a
        given size (to measure) and with whether this is a rehearsal; it makes choices that the
        recordings then contain. `images`: given where layers attend to images. `mixed`: steps with
        prompts, recorded after the decode steps and forgotten with them. `carveouts`: chosen after
        `before`, where kernels can be given a shared-memory carve-out.
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
        self._width = 0  # blocks a row, of the block tables of the recordings
        self._recorded: dict[int, Recording] = {}

    def forget(self) -> None:
        """Drop every recording, since each keeps the KV cache alive that it was captured with."""
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
        """Record every size over `cache`, for block tables of up to `width` blocks a row.

        `most`: the largest number of rows of a step; sizes above the first that holds them are left
        out. The largest size is captured first, so that the smaller ones reuse its memory. `pool`:
        given where the model keeps states. `tokens`: the most tokens of a step with prompts.

        Raises ConfigurationError if decode steps cannot be captured. Launching them kernel by
        kernel would take many times as long, so that is done only where a flag asks for it.
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
        self._record_mixed(_mixed_sizes(tokens, sizes, pool), cache, width)

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
        """Run once what `record` captures, for a few sizes: most sizes launch the same kernels."""
        sizes = self._sizes_for(most)
        few = sorted({*sizes[:2], *sizes[len(sizes) // 2 :][:1], *sizes[-1:]})
        mixed = _mixed_sizes(tokens, sizes, pool)
        with self._capture.rehearsing():
            # First, because nothing else launches these kernels: they compile beside the rest.
            self._choose_ahead(cache, width, pool, rehearses=True)
            self._record_all(few, cache, width, pool)
            self._record_mixed([*mixed[:1], *mixed[1:][-1:]], cache, width)
        self.forget()

    def _choose_ahead(
        self, cache: KVCache, width: int, pool: StatePool | None, *, rehearses: bool
    ) -> None:
        """Call `before`, which measures idle steps and decides what the recordings contain."""
        if self._before is None:
            return
        self._recorder.pool = pool
        self._before(lambda size: self._recorder.idle(size, cache, width), rehearses)

    def forward(self, plan: StepPlan, lengths: Array | None) -> torch.Tensor | None:
        """Return hidden states [T, hidden], valid until the next call; None if no graph fits.

        `lengths`: int64 [T] as for `Model.forward`; None for a model that does not read them.
        """
        recorded = self.find(plan)
        if recorded is None:
            return None
        step = self._refill(recorded, plan, lengths, None)
        step.graph.replay()
        return step.hidden[: len(plan.token_ids)]

    def replay(self, plan: StepPlan, lengths: Array | None) -> bool:
        """Replay a decode step whose tokens another rank chooses; False if no graph fits."""
        return self.forward(plan, lengths) is not None

    def choose(
        self,
        recorded: Recording,
        plan: StepPlan,
        lengths: Array | None,
        host_inputs: HostInputs | None,
        links: Sequence[Array] = (),
    ) -> Chosen | None:
        """Replay a decode step and choose a token for each row; None if it is not chosen here.

        `recorded`: what `find` returned for the plan. `host_inputs`: the sampling parameters, as
        `DeviceSampler.make_inputs` returns them for the recording's size; None: nothing is chosen,
        and the scores are left as the model computed them. `links`: what `DeviceChain.arrays`
        returns; empty if the step follows no drafts.
        """
        sampler = self._sampler
        if sampler is None or recorded.memory.reserved is None:
            return None
        rows = len(plan.token_ids)
        step = self._refill(recorded, plan, lengths, host_inputs, links)
        if step.chosen is None:
            return None
        sampler.refill_entries(
            recorded.memory.reserved, host_inputs or recorded.memory.reserved.idle
        )
        step.graph.replay()
        kind = (rows, host_inputs is not None, host_inputs is not None and host_inputs.widest > 0)
        if kind not in step.parts:
            step.parts[kind] = self._part(step.chosen, recorded.memory.size, *kind)
        return step.parts[kind]

    def repeat(
        self,
        recorded: Recording,
        plan: StepPlan,
        lengths: Array | None,
        host_inputs: HostInputs | None,
        *,
        same: bool,
    ) -> None:
        """Do what `choose` did in the last step, for the same rows, inputs and block tables.

        The choice is left in the same memory as the last step's. `same`: `host_inputs` has not
        changed.
        """
        adapted = self._adapters is not None and self._adapters.used
        if same and lengths is None and self._recorder.pool is None and not adapted:
            moved = plan.token_ids, rotary_position(plan), plan.kv_slots, plan.context_lengths
            self._staging.fill_from(recorded.memory.sheet, moved, recorded.memory.moving)
            recorded.steps[_PLAIN].graph.replay()
            return
        step = self._refill(recorded, plan, lengths, host_inputs)
        if (
            host_inputs is not None
            and self._sampler is not None
            and recorded.memory.reserved is not None
        ):
            self._sampler.refill_entries(recorded.memory.reserved, host_inputs)
        step.graph.replay()

    @property
    def has_no_images(self) -> bool:
        """Whether no layer attends to images."""
        return self._images is None

    def _part(self, whole: Chosen, size: int, rows: int, chooses: bool, lists: bool) -> Chosen:
        """Return views of the first `rows` rows of a recording of `size` rows."""
        found = None
        if chooses and whole.found is not None:
            found = whole.found.first(rows, lists=lists)
        hidden = self._recorder.hidden
        hidden = None if hidden is None else hidden[:rows]
        ids = None if whole.ids is None else whole.ids[:rows]
        return Chosen(whole.scores[:rows], found, hidden, size, ids)

    def choose_masked(self, size: int, host_inputs: HostInputs, masks: Masks) -> Found:
        """Choose, with masks, from the scores of the last step, which replayed the graph of `size`.

        `host_inputs`: as for `choose`.
        """
        recorded, sampler = self._recorded[size], self._sampler
        if recorded.masked is None or sampler is None:
            raise RuntimeError("tokens are not chosen where this is recorded")
        sampler.refill(recorded.masked.reserved, host_inputs)
        sampler.refill_masks(recorded.masked.masks, masks)
        recorded.masked.graph.replay()
        return recorded.masked.found.first(len(masks.green), lists=host_inputs.widest > 0)

    def find(self, plan: StepPlan) -> Recording | None:
        """Return the smallest recording that holds a plan; None if there is none."""
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
        host_inputs: HostInputs | None,
        links: Sequence[Array] = (),
    ) -> RecordedStep:
        """Copy a plan's inputs to where the graphs read them; return the step to replay.

        Everything but the sampler's entries (biases and tokens to count) is uploaded in a single
        copy, because the device waits for each copy between two steps.
        """
        arrays = self._recorder.token_arrays(plan, lengths)
        arrays += links or recorded.memory.unlinked
        if recorded.memory.reserved is not None:
            arrays += (host_inputs or recorded.memory.reserved.idle).arrays
        arrays += self._attention.arrays(plan)
        self._staging.fill_from(recorded.memory.sheet, arrays)
        adapted = self._adapters is not None and self._adapters.used
        if self._adapters is not None and recorded.memory.adapters is not None and adapted:
            self._adapters.refill(recorded.memory.adapters)
        crossed = self._images is not None and self._images.wants(plan)
        if self._images is not None and recorded.memory.images is not None and crossed:
            self._images.refill(recorded.memory.images, pad_plan(plan, recorded.memory.size))
        return recorded.steps[StepKind(adapted, crossed) if adapted or crossed else _PLAIN]


def _mixed_sizes(tokens: int, sizes: Sequence[int], pool: StatePool | None) -> list[MixedSize]:
    """Return the sizes of steps with prompts, of up to `tokens` tokens."""
    return mixed_sizes(tokens, sizes, in_turns=pool is not None and pool.in_turns)
