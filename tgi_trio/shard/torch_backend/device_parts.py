"""Assembles what a model on a device has besides weights: CUDA graphs, steps launched ahead."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from tgi_trio.model.config import ModelConfig
from tgi_trio.shard.machine.accelerator import runs_kernels
from tgi_trio.shard.sampling.base import RowSampler
from tgi_trio.shard.speculation.hidden import LastStep
from tgi_trio.shard.torch_backend.attention.interface import (
    AttentionBackend,
    AttentionNeeds,
    CapturableAttention,
)
from tgi_trio.shard.torch_backend.attention.kinds import make_capturable
from tgi_trio.shard.torch_backend.attention.paged.few_heads import (
    HeadProjection,
    choose_for_heads,
)
from tgi_trio.shard.torch_backend.compiling.ahead import rehearse_early
from tgi_trio.shard.torch_backend.drafting.device_drafting import DeviceDrafting
from tgi_trio.shard.torch_backend.drafting.heads import TorchHeads
from tgi_trio.shard.torch_backend.layers.linears.few_rows import (
    Projection,
    Seconds,
    choose_for_few_rows,
)
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.layers.linears.lone_shares import choose_shares, give_shares
from tgi_trio.shard.torch_backend.layers.residual import Addends
from tgi_trio.shard.torch_backend.models.beginning import Begin, Beginning
from tgi_trio.shard.torch_backend.models.decoder import Ranks
from tgi_trio.shard.torch_backend.recordings.carveouts import Carveouts
from tgi_trio.shard.torch_backend.recordings.cuda_graphs import (
    CudaCapture,
    RecordedTime,
    ReplayTime,
)
from tgi_trio.shard.torch_backend.recordings.decode_graphs import DecodeGraphs
from tgi_trio.shard.torch_backend.recordings.graph_nodes import open_nodes
from tgi_trio.shard.torch_backend.recordings.image_pages import ImagePages
from tgi_trio.shard.torch_backend.recordings.recorded_steps import (
    DecodeForward,
    Ends,
    IdleSteps,
    RecordedAdapters,
)
from tgi_trio.shard.torch_backend.recordings.step_forward import (
    MOST_CHOICES,
    StagedAdapters,
    StepForward,
)
from tgi_trio.shard.torch_backend.recordings.token_source import TokenSource
from tgi_trio.shard.torch_backend.sampling.choice_masks import ChoiceMasks
from tgi_trio.shard.torch_backend.sampling.torch_sampler import Sampler, permutation
from tgi_trio.shard.torch_backend.step_features import ImageStates
from tgi_trio.shard.torch_backend.steps.followed_steps import FollowedSteps
from tgi_trio.shard.torch_backend.torch_device import has_triton

if TYPE_CHECKING:
    from tgi_trio.shard.torch_backend.drafting.device_chain import DeviceChain
    from tgi_trio.shard.torch_backend.recordings.mixed_graphs import MixedGraphs
    from tgi_trio.shard.torch_backend.sampling.device_sampler import DeviceSampler
    from tgi_trio.shard.torch_backend.steps.device_steps import DeviceSteps


class KernelAdapters(RecordedAdapters, StagedAdapters, Protocol):
    """Adapters whose products our kernels compute."""


class DeviceModel(Protocol):
    """The attributes of a model that this file uses."""

    @property
    def capturable(self) -> bool: ...
    @property
    def attention_needs(self) -> AttentionNeeds: ...
    def linears(self) -> Iterable[Linear]: ...
    def projections(self) -> Iterable[Projection]: ...
    def head_projections(self) -> Iterable[tuple[HeadProjection, Addends | None]]: ...
    @property
    def beginning(self) -> Beginning: ...
    @property
    def begin(self) -> Begin: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def forward(self) -> DecodeForward: ...
    @property
    def raw_logits(self) -> Callable[[torch.Tensor], torch.Tensor]: ...
    @property
    def keep_positions(self) -> Callable[[int], None]: ...


@dataclass(frozen=True, slots=True)
class DeviceDrafter:
    """What drafts for a model on the device."""

    most: int  # tokens drafted for a row
    last: LastStep  # keeps the drafts
    heads: TorchHeads | None = None  # None: n-grams

    def drafting(self, vocab_size: int) -> DeviceDrafting | None:
        """Return what drafts after every choice of a step; None for n-grams."""
        if self.heads is None:
            return None
        return DeviceDrafting(self.heads, self.most, vocab_size)


@dataclass(frozen=True, slots=True)
class _Common:
    """What recorded steps and steps that are launched kernel by kernel have in common."""

    model: DeviceModel
    device: torch.device
    ends: Ends | None
    adapters: KernelAdapters | None
    images: ImageStates | None

    def make_graphs(
        self,
        attention: CapturableAttention,
        sizes: tuple[int, ...],
        *,
        mixes: bool,
        alone: bool,
        invariant: bool,
    ) -> tuple[DecodeGraphs, MixedGraphs | None]:
        """Return what records decodes, and (if it `mixes`) what records steps with prompts."""
        capture, choose, carveouts = _recording_choices(
            self.model, self.device, alone=alone, invariant=invariant
        )
        pages = self.images if isinstance(self.images, ImagePages) else None
        mixed = None
        if self.ends is not None and mixes:
            from tgi_trio.shard.torch_backend.recordings.mixed_graphs import MixedGraphs

            mixed = MixedGraphs(
                self.model.forward,
                attention,
                capture,
                self.device,
                self.ends,
                ReplayTime(self.device),
                self.adapters,
                pages,
            )
        graphs = DecodeGraphs(
            self.model.forward,
            attention,
            capture,
            sizes,
            self.device,
            self.ends,
            self.adapters,
            before=choose,
            images=pages,
            mixed=mixed,
            carveouts=carveouts,
        )
        return graphs, mixed

    def make_forward(self, attention: AttentionBackend, ends: Ends) -> StepForward:
        """Return what launches steps kernel by kernel."""
        return StepForward(
            self.model.forward,
            self.model.raw_logits,
            attention,
            ends.tokens,
            self.device,
            self.model.keep_positions,
            self.adapters,
            self.images,
        )


def device_parts(
    model: DeviceModel,
    attention: AttentionBackend,
    sampler: RowSampler,
    config: ModelConfig,
    device: torch.device,
    sizes: tuple[int, ...],
    ranks: Ranks | None = None,
    adapters: KernelAdapters | None = None,
    drafts: DeviceDrafter | None = None,
    images: ImageStates | None = None,
    *,
    ahead: bool = True,
    invariant: bool = False,
) -> tuple[DecodeGraphs | None, DeviceSteps | FollowedSteps | None]:
    """Return what records decodes of the batch sizes `sizes`, and what launches steps.

    Drafts made on the device are kept in `drafts.last`; `images` is passed to `StepFeatures.of`.
    Either result is None where it is impossible: without a device or Triton, for models whose
    kernels depend on their tokens, and on the rank that chooses tokens with another sampler than
    ours. If not `ahead`, no step may be launched before the previous one has been read: then
    nothing launches steps, and steps with prompts are not recorded. `invariant`: nothing is chosen
    by measuring, see `batch_invariance.py`.
    """
    capturable = None
    if model.capturable:
        capturable = make_capturable(model.attention_needs, device, invariant=invariant)
    ends: Ends | None = None
    if runs_kernels(device) and has_triton():
        records = capturable is not None and bool(sizes) and ranks is None
        ends = _find_ends(model, sampler, config, device, ranks, drafts, records=records)
    common = _Common(model, device, ends, adapters, images)
    graphs, mixed = None, None
    if capturable is None:
        warn_no_graphs(sizes, "its steps cannot be recorded")
    elif sizes:
        how = {"alone": ranks is None, "invariant": invariant}
        graphs, mixed = common.make_graphs(capturable, sizes, mixes=ahead, **how)
    if ends is None or not ahead:
        return graphs, None
    computes = common.make_forward(attention, ends)
    if ends.sampler is None or not isinstance(sampler, Sampler):
        return graphs, FollowedSteps(computes, graphs, mixed)
    from tgi_trio.shard.torch_backend.sampling.device_gaps import choose_in_gaps
    from tgi_trio.shard.torch_backend.steps.device_steps import DeviceSteps

    masks = _choice_masks(sampler, config)
    last = None if drafts is None else drafts.last
    return graphs, DeviceSteps(
        *(computes, ends.sampler, masks, partial(choose_in_gaps, sampler)),
        *(graphs, last, ends.chain, mixed),
    )


def _recording_choices(
    model: DeviceModel, device: torch.device, *, alone: bool, invariant: bool
) -> tuple[CudaCapture, Callable[[IdleSteps, bool], None] | None, Carveouts | None]:
    """Return what captures steps, what chooses kernels before that, and carve-outs of each graph.

    Both choices are made by measuring. If not `alone`, there are several ranks, and no step is
    measured, since none ends without the other ranks' steps.
    """
    nodes = open_nodes(device) if alone and has_triton() else None
    capture = CudaCapture(device, alone=alone, nodes=nodes)
    choose = None
    if has_triton() and not invariant:  # what is chosen is for some numbers of rows
        choose = _choice(model, RecordedTime(device, capture), alone=alone)
    carveouts = None if nodes is None else Carveouts(capture, ReplayTime(device).least)
    return capture, choose, carveouts


@torch.inference_mode()
def rehearse_choices(
    sampler: RowSampler, config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> None:
    """Have the kernels that choose tokens compiled while a model with logits of `dtype` is loaded.

    They take longest to compile, and need no weights.
    """
    if not isinstance(sampler, Sampler) or not runs_kernels(device) or not has_triton():
        return

    def choose() -> None:
        from tgi_trio.shard.torch_backend.sampling.idle_choices import choose_idle

        chooser = _device_sampler(sampler, config, device, None)
        masks = _choice_masks(sampler, config)
        logits = torch.empty((1, config.vocab_size), dtype=dtype, device=device)
        for scores in (logits, chooser.make_scores(1)):
            choose_idle(chooser, masks, scores)

    rehearse_early(device, choose)


def _find_ends(
    model: DeviceModel,
    sampler: RowSampler,
    config: ModelConfig,
    device: torch.device,
    ranks: Ranks | None,
    drafts: DeviceDrafter | None,
    *,
    records: bool,
) -> Ends | None:
    """Return where steps get their tokens and what chooses the next; None if the sampler is not
    ours.

    `records`: steps are recorded, so those with drafts may be chained.
    """
    if ranks is not None and ranks.rank > 0:
        return Ends(TokenSource(None, ranks), model.raw_logits, None, None)
    if not isinstance(sampler, Sampler):
        return None
    drafting = None if drafts is None else drafts.drafting(config.vocab_size)
    chooser = _device_sampler(sampler, config, device, drafting)
    chain = _chain(chooser, config.eos_ids, drafts) if drafts is not None and records else None
    return Ends(TokenSource(chooser.chosen, ranks), model.raw_logits, chooser, chain)


def _chain(chooser: DeviceSampler, eos_ids: Iterable[int], drafts: DeviceDrafter) -> DeviceChain:
    """Return what chains recorded steps with drafts."""
    from tgi_trio.shard.torch_backend.drafting.device_chain import DeviceChain
    from tgi_trio.shard.torch_backend.drafting.device_texts import DeviceTexts

    chosen = chooser.chosen
    if chooser.drafting is not None:
        return DeviceChain(chosen, chooser.drafting.most)
    texts = DeviceTexts(drafts.most, eos_ids, chosen.device, len(chosen))
    return DeviceChain(chosen, drafts.most, texts)


def _choice(
    model: DeviceModel, seconds: Seconds, *, alone: bool
) -> Callable[[IdleSteps, bool], None]:
    """Return the argument `before` of `DecodeGraphs`: it chooses kernels for few rows by measuring.

    If not `alone`, there are other ranks, without whose steps no step ends.
    """

    def choose(idle: IdleSteps, rehearses: bool) -> None:
        model.beginning.choose(model.begin, seconds)
        choose_for_few_rows(model.linears(), model.projections(), seconds, lone=rehearses)
        if alone:
            choose_for_heads(model.head_projections(), idle, seconds)
            choose_shares(model.linears(), idle(1), seconds)
        if alone and rehearses:  # nothing was measured: also compile what may be chosen later
            give_shares(model.linears(), other=True)
            choose_for_few_rows(model.linears(), model.projections(), seconds, lone=True)
            choose_for_heads(model.head_projections(), idle, seconds)
            give_shares(model.linears(), other=False)

    return choose


def _device_sampler(
    sampler: Sampler, config: ModelConfig, device: torch.device, drafting: DeviceDrafting | None
) -> DeviceSampler:
    from tgi_trio.shard.torch_backend.sampling.device_sampler import DeviceSampler

    delta = sampler.watermark.delta
    return DeviceSampler(config.vocab_size, config.eos_ids, device, MOST_CHOICES, delta, drafting)


def _choice_masks(sampler: Sampler, config: ModelConfig) -> ChoiceMasks:
    return ChoiceMasks(config.vocab_size, sampler.grammars, sampler.watermark, permutation)


def warn_no_graphs(sizes: tuple[int, ...], why: str) -> None:
    """Print why no graphs are recorded, if `sizes` asks for any."""
    if sizes:
        print(f"no CUDA graphs are recorded, --cuda-graphs has no effect: {why}", file=sys.stderr)
