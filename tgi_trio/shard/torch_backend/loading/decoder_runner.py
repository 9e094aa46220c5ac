"""Makes a runner of a loaded decoder: with attention, adapters, images, CUDA graphs."""

from __future__ import annotations

import time

from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.model.adapters.sites import AdapterScope
from tgi_trio.model.config import ModelConfig
from tgi_trio.settings.records import MTP
from tgi_trio.shard.sampling.base import RowSampler
from tgi_trio.shard.speculation.hidden import LastStep
from tgi_trio.shard.torch_backend.adapters.device_adapters import DeviceAdapters
from tgi_trio.shard.torch_backend.adapters.torch_adapters import TorchAdapters
from tgi_trio.shard.torch_backend.attention.choice import capturable_attention
from tgi_trio.shard.torch_backend.attention.interface import AttentionBackend
from tgi_trio.shard.torch_backend.attention.kinds import make_attention
from tgi_trio.shard.torch_backend.device_parts import DeviceDrafter, device_parts
from tgi_trio.shard.torch_backend.drafting.assistant import TorchAssistant
from tgi_trio.shard.torch_backend.drafting.heads import TorchHeads
from tgi_trio.shard.torch_backend.drafting.trained import TrainedDrafter
from tgi_trio.shard.torch_backend.host_copies import HostRoom
from tgi_trio.shard.torch_backend.image_states import CrossShape, ImageSource, KeptStates
from tgi_trio.shard.torch_backend.kv_cache import EIGHT_BITS, KVShape
from tgi_trio.shard.torch_backend.loading.assistant import find_assistant
from tgi_trio.shard.torch_backend.loading.draft_module import DraftModule
from tgi_trio.shard.torch_backend.loading.target import LoadTarget
from tgi_trio.shard.torch_backend.models.decoder import Decoder
from tgi_trio.shard.torch_backend.recordings.image_pages import ImagePages
from tgi_trio.shard.torch_backend.torch_device import runs_kernels
from tgi_trio.shard.torch_backend.torch_runner import TorchRunner


def make_decoder_runner(
    model: Decoder,
    settings: ShardSettings,
    config: ModelConfig,
    target: LoadTarget,
    sampler: RowSampler,
    graph_sizes: tuple[int, ...],
    heads: DraftModule | None,
    began: int,
    *,
    ahead: bool,
) -> TorchRunner:
    """Return the runner of a decoder; loading `began` at this time of `time.monotonic_ns`.

    `heads`: draft for the model on this rank. If not `ahead`, the host has to act between two
    steps, so no rank launches a step before the previous one has been read.
    """
    kv_dtype = EIGHT_BITS[settings.kv_cache_dtype] if settings.kv_cache_dtype else None
    adapters = _adapters(settings, config, model, target)
    attention = _attention(model, target, eight_bits=kv_dtype is not None)
    images = _image_states(settings, model, target, records=bool(graph_sizes))
    last = LastStep()
    graphs, steps = device_parts(
        model,
        attention,
        sampler,
        config,
        target.device,
        graph_sizes,
        target.ranks,
        adapters if isinstance(adapters, DeviceAdapters) else None,
        _make_device_drafter(settings, model, heads, last),
        images,
        ahead=ahead,
        invariant=target.invariant,
    )
    assistant = find_assistant(settings.draft_model, config, model, target, kv_dtype)
    return TorchRunner(
        model,
        config,
        dtype=target.dtype,
        device=target.device,
        sampler=sampler,
        attention=attention,
        graphs=graphs,
        steps=steps,
        ranks=target.group,
        speculate=settings.speculate or 0,
        load_ns=time.monotonic_ns() - began,
        kv_dtype=kv_dtype,
        draft_module=_make_trained_drafter(heads, assistant, last, target),
        adapters=adapters,
        images=images,
        invariant=target.invariant,
        host=_host_room(settings, target) if model.prefix_reuse else None,
    )


def _attention(model: Decoder, target: LoadTarget, *, eight_bits: bool) -> AttentionBackend:
    """Return what attends in this rank's layers."""
    needs, device, dtype = model.attention_needs, target.device, target.dtype
    return make_attention(needs, device, dtype, eight_bits=eight_bits, invariant=target.invariant)


def _make_trained_drafter(
    heads: DraftModule | None, assistant: TorchAssistant | None, last: LastStep, target: LoadTarget
) -> TrainedDrafter:
    """Return what drafts from the states of the last step, if anything does."""
    return TrainedDrafter(
        heads=heads if isinstance(heads, TorchHeads) else None,
        layers=None if isinstance(heads, TorchHeads) else heads,
        assistant=assistant,
        last=last,
        own_head=target.group is not None,
    )


def _host_room(settings: ShardSettings, target: LoadTarget) -> HostRoom:
    """Return this rank's part of the host's memory for copies."""
    own = settings.prefix_cache_host_bytes // settings.world_size
    return HostRoom(own, target.device, settings.place_on_machine[1])


def _make_device_drafter(
    settings: ShardSettings, model: Decoder, heads: DraftModule | None, last: LastStep
) -> DeviceDrafter | None:
    """Return what drafts on the device, with its results kept by `last`; None: nothing does."""
    if settings.speculate and isinstance(heads, TorchHeads):
        return DeviceDrafter(settings.speculate, last, heads)
    looks_up = settings.draft_model is None and settings.drafter != MTP
    if settings.speculate and looks_up and _may_follow(model):
        return DeviceDrafter(settings.speculate, last)
    return None


def _image_states(
    settings: ShardSettings, model: Decoder, target: LoadTarget, *, records: bool
) -> KeptStates | ImagePages | None:
    """Return what keeps images' keys and values; None if layers read them where the tower left
    them. `records`: whether decodes are to be recorded.
    """
    rank, size = (target.ranks.rank, target.ranks.size) if target.ranks else (0, 1)
    shape = CrossShape.of(model.spec, target.dtype, rank, size)
    if shape is None or (size == 1 and target.device.type == "cpu"):
        return None
    source = ImageSource(shape, target.device, target.ranks)
    pages = KVShape(shape.layers, shape.mine.stop - shape.mine.start, shape.head_dim)
    attention = capturable_attention(target.device, pages) if records else None
    if attention is None or not model.capturable:
        return KeptStates(source, settings.feature_memory)
    cross_attention = next(
        layer.cross_attention for layer in model.spec.layers if layer.cross_attention
    )
    return ImagePages(source, cross_attention, attention, settings.feature_memory)


def _may_follow(model: Decoder) -> bool:
    """Return whether a model's steps may follow drafts that the host has not read."""
    return not model.needs_lengths and not model.state_shapes


def _adapters(
    settings: ShardSettings, config: ModelConfig, decoder: Decoder, target: LoadTarget
) -> DeviceAdapters | TorchAdapters | None:
    """Return what loads adapters, None if none are served; raises what `DeviceAdapters` does."""
    if not settings.max_lora_rank:
        return None
    rank = target.ranks.rank if target.ranks else 0
    if runs_kernels(target.device):
        return DeviceAdapters(
            config,
            decoder,
            target.dtype,
            target.device,
            max_rank=settings.max_lora_rank,
            scope=AdapterScope.of(settings.adapter_scope),
            slots=settings.max_loaded_adapters,
            invariant=target.invariant,
            rank=rank,
            world_size=target.world_size,
        )
    return TorchAdapters(
        config,
        decoder,
        target.dtype,
        target.device,
        max_rank=settings.max_lora_rank,
        scope=AdapterScope.of(settings.adapter_scope),
        rank=rank,
        world_size=target.world_size,
    )
