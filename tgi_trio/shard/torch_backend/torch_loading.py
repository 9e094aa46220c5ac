"""From a model folder to the runner that serves it with torch.

The generic decoder where the family table knows the model, T5 for its kin, transformers for the
rest; all are runners to the worker loop.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tgi_trio.errors import ConfigurationError, ModelLoadError
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.model.check import (
    activations_refusal,
    check_checkpoint,
    check_rotary,
    heads_refusal,
    kv_refusal,
    model_spec,
    rounding_refusal,
    split_refusal,
)
from tgi_trio.model.config import ModelConfig, RopeScaling, read_config
from tgi_trio.model.decoder_matrices import outer_refs
from tgi_trio.model.quantised.recognise import find_made
from tgi_trio.model.spec import DecoderSpec
from tgi_trio.model.speculators.eagle import check_hidden_states
from tgi_trio.model.speculators.recognise import find_kind, read_heads
from tgi_trio.model.speculators.spec import EagleSpec
from tgi_trio.model.stages import Stage
from tgi_trio.model.t5_spec import T5Spec
from tgi_trio.model.tensors import decoder_matrices
from tgi_trio.shard.checkpoint.lookup import Checkpoint, open_checkpoint
from tgi_trio.shard.checkpoint.rounding.choose import ENCODINGS
from tgi_trio.shard.checkpoint.rounding.encoding import Encoding
from tgi_trio.shard.contract import Runner
from tgi_trio.shard.machine.cores import sensible_threads
from tgi_trio.shard.machine.device_memory import free_bytes
from tgi_trio.shard.machine.dtypes import compute_dtype
from tgi_trio.shard.sampling.base import RowSampler
from tgi_trio.shard.sampling.decoder_sampler import DecoderSampler
from tgi_trio.shard.sampling.logits_processors import GrammarMasks, Watermark
from tgi_trio.shard.speculation.hidden import LastStep
from tgi_trio.shard.torch_backend.adapters import TorchAdapters, refuse_adapters
from tgi_trio.shard.torch_backend.attention.choice import capturable_attention, choose_attention
from tgi_trio.shard.torch_backend.attention.indexed import IndexedAttention
from tgi_trio.shard.torch_backend.attention.interface import AttentionBackend
from tgi_trio.shard.torch_backend.compiling_ahead import begin_early
from tgi_trio.shard.torch_backend.device_adapters import DeviceAdapters
from tgi_trio.shard.torch_backend.device_parts import Guesses, device_parts, tell_no_graphs
from tgi_trio.shard.torch_backend.eagle import TorchEagle, load_eagle
from tgi_trio.shard.torch_backend.heads import TorchHeads, load_heads
from tgi_trio.shard.torch_backend.image_pages import ImagePages
from tgi_trio.shard.torch_backend.image_states import CrossShape, ImageSource, KeptStates
from tgi_trio.shard.torch_backend.kv_cache import EIGHT_BITS, KVShape
from tgi_trio.shard.torch_backend.layers.linear import Linear
from tgi_trio.shard.torch_backend.models.decoder import Decoder, Ranks
from tgi_trio.shard.torch_backend.models.decoder_loading import (
    DecoderLoader,
    load_decoder,
    load_stage,
)
from tgi_trio.shard.torch_backend.models.t5 import T5Layout
from tgi_trio.shard.torch_backend.models.t5_loading import load_t5
from tgi_trio.shard.torch_backend.sampling.torch_sampler import Sampler
from tgi_trio.shard.torch_backend.torch_device import resolve_device, runs_kernels
from tgi_trio.shard.torch_backend.torch_runner import TorchRunner
from tgi_trio.shard.torch_backend.weights import WeightSource


@dataclass(frozen=True, slots=True)
class _Target:
    """Where a model is loaded to, and which part of it."""

    dtype: torch.dtype
    device: torch.device
    group: Ranks | None  # of all ranks
    staged: bool = False  # each rank has a run of the layers, not a part of each
    active_bits: int = 16  # of activations that 8-bit weights are multiplied by

    @property
    def world_size(self) -> int:
        return self.group.size if self.group else 1

    @property
    def ranks(self) -> Ranks | None:
        """Return those among which every matrix is divided."""
        return None if self.staged else self.group

    @property
    def stage(self) -> Stage | None:
        """Return this rank's place in the pipeline, None where there is none."""
        return Stage(self.group.rank, self.group.size) if self.group and self.staged else None

    def weights(self, checkpoint: Checkpoint, numbers: int = 0) -> WeightSource:
        """Return this rank's part of a checkpoint's tensors.

        `numbers`: those of all matrices. Quantised ones stay so where they would take more than
        half of the memory that is free, as numbers of the dtype.
        """
        rank = self.ranks.rank if self.ranks else 0
        free = free_bytes(self.device, self.world_size)
        return WeightSource(
            checkpoint,
            dtype=self.dtype,
            device=self.device,
            rank=rank,
            world_size=self.ranks.size if self.ranks else 1,
            keeps_codes=numbers * self.dtype.itemsize // self.world_size > free // 2,
            activations=self.active_bits,
        )


def load_torch_runner(
    settings: ShardSettings,
    *,
    device: str = "cpu",
    ranks: Ranks | None = None,
    sampler: RowSampler | None = None,
    grammars: GrammarMasks | None = None,
    graph_sizes: tuple[int, ...] = (),
    fresh_files: frozenset[Path] = frozenset(),
) -> Runner:
    """Load `settings.model_path`, as written by `save_pretrained`.

    `device`: a name of torch's; `graph_sizes`: batch sizes whose decodes are recorded, where device
    and model allow it. `sampler` None: one for the model, which serves `grammars`; without them
    they are refused. With `ranks`, this rank's part is loaded. `fresh_files` leave the page cache
    again as they are packed. Raises ModelLoadError for files that cannot be used,
    ConfigurationError for settings that cannot.
    """
    began = time.monotonic_ns()
    config, where = read_config(settings.model_path, settings.rope), resolve_device(device)
    dtype = compute_dtype(settings.dtype, config, on_cpu=where.type == "cpu")
    begin_early(where)
    staged = settings.pipeline_stages > 1
    target = _Target(getattr(torch, dtype), where, ranks, staged, settings.activations or 16)
    if staged:
        tell_no_graphs(graph_sizes, "other ranks compute layers of each step")
        graph_sizes = ()
    torch.set_num_threads(_count_threads(settings, target.world_size))
    if sampler is None:
        sampler = _make_sampler(settings, config, where, grammars)
    spec = _checked_spec(config, settings.rope)
    if settings.activations == 8 and not isinstance(spec, DecoderSpec):
        raise ConfigurationError(activations_refusal(config))
    made = find_made(config, settings.quantize)
    encoding = None if made is None else ENCODINGS[made]
    guessing = settings.draft_model
    kind = None if guessing is None else find_kind(guessing)
    if kind is None:
        guessing = None
    if isinstance(spec, DecoderSpec):
        model = _load_decoder(config, spec, target, fresh_files, encoding)
        heads: TorchHeads | TorchEagle | None = None
        if guessing is not None and (ranks is None or ranks.rank == 0):
            heads = _load_guesser(guessing, config, model, target, encoding)
        return _make_runner(
            model,
            settings,
            config,
            target,
            sampler,
            graph_sizes,
            heads,
            began,
            ahead=not staged and (kind is None or not kind.goes_on),
        )
    if settings.max_lora_rank:
        raise refuse_adapters(
            f"of {config.model_type} models no linears are known by name, or it has an encoder"
        )
    if guessing is not None:
        raise ConfigurationError(heads_refusal(config))
    if settings.kv_cache_dtype is not None:
        raise ConfigurationError(kv_refusal(config, settings.kv_cache_dtype))
    if isinstance(spec, T5Spec):
        tell_no_graphs(graph_sizes, "the model has an encoder")
        return _load_t5(config, spec, target, sampler, encoding)
    tell_no_graphs(graph_sizes, "the model runs through transformers")
    if made is not None:
        raise ConfigurationError(rounding_refusal(config, made))
    return _load_fallback(config, target, sampler, settings.trust_remote_code)


def _make_sampler(
    settings: ShardSettings,
    config: ModelConfig,
    device: torch.device,
    grammars: GrammarMasks | None,
) -> RowSampler:
    watermark = Watermark(settings.watermark_gamma, settings.watermark_delta)
    return Sampler(
        config.vocab_size, config.eos_ids, device, grammars=grammars, watermark=watermark
    )


def _make_runner(
    model: Decoder,
    settings: ShardSettings,
    config: ModelConfig,
    target: _Target,
    sampler: RowSampler,
    graph_sizes: tuple[int, ...],
    heads: TorchHeads | TorchEagle | None,
    began: int,
    *,
    ahead: bool,
) -> TorchRunner:
    """Return what serves a decoder, whose loading `began` at a time of `time.monotonic_ns`.

    Not `ahead`: something reads hidden states between two steps, so no rank launches before.
    """
    kv_dtype = EIGHT_BITS[settings.kv_cache_dtype] if settings.kv_cache_dtype else None
    adapters = _adapters(settings, model, target)
    attention: AttentionBackend = (
        IndexedAttention()
        if model.spec.index
        else choose_attention(
            target.device,
            target.dtype,
            model.kv_shape,
            eight_bits=kv_dtype is not None,
            in_kernels=model.attends_in_kernels,
        )
    )
    images = _image_states(settings, model, target, records=bool(graph_sizes))
    last = LastStep()
    guesses = None
    if settings.speculate and isinstance(heads, TorchHeads):
        guesses = Guesses(settings.speculate, last, heads)
    elif settings.speculate and settings.draft_model is None and _may_follow(model):
        guesses = Guesses(settings.speculate, last)
    graphs, steps = device_parts(
        model,
        attention,
        sampler,
        config,
        target.device,
        graph_sizes,
        target.ranks,
        adapters if isinstance(adapters, DeviceAdapters) else None,
        guesses,
        images,
    )
    if not ahead:
        steps = None
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
        heads=heads if isinstance(heads, TorchHeads) else None,
        eagle=heads if isinstance(heads, TorchEagle) else None,
        last=last,
        adapters=adapters,
        images=images,
    )


def _image_states(
    settings: ShardSettings, model: Decoder, target: _Target, *, records: bool
) -> KeptStates | ImagePages | None:
    """Return what keeps what layers read of images; None where it stays where the tower left it.

    `records`: decodes are to be recorded.
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
    crossing = next(layer.crosses for layer in model.spec.layers if layer.crosses)
    return ImagePages(source, crossing, attention, settings.feature_memory)


def _may_follow(model: Decoder) -> bool:
    """Return whether a model's steps may follow guesses that nobody has read."""
    return not model.needs_lengths and not model.state_shapes


def _count_threads(settings: ShardSettings, world_size: int) -> int:
    """Return how many threads torch is to have in this process."""
    if settings.cpu_threads:
        return settings.cpu_threads
    worth = sensible_threads(settings.model_path, torch.get_num_threads())
    return max(1, worth // world_size)


def _checked_spec(config: ModelConfig, rope: RopeScaling | None) -> DecoderSpec | T5Spec | None:
    """Return how we run a model, None where transformers does; raises what `check_model` does."""
    spec = model_spec(config)
    check_checkpoint(config, spec)
    if rope is not None:
        check_rotary(config, spec)
    return spec


def _load_decoder(
    config: ModelConfig,
    spec: DecoderSpec,
    target: _Target,
    fresh_files: frozenset[Path],
    encoding: Encoding | None,
) -> Decoder:
    opened = open_checkpoint(
        config, spec.names.base, given_back=fresh_files, writable=True, encoding=encoding
    )
    model: Decoder
    numbers = sum(matrix.rows * matrix.columns for matrix in decoder_matrices(spec))
    with opened as checkpoint, torch.inference_mode():
        source = target.weights(checkpoint, numbers)
        if target.group is not None and target.stage is not None:
            model = load_stage(spec, source, target.stage, target.group)
        else:
            model = load_decoder(spec, source, target.ranks)
    if target.active_bits == 8 and not source.rounds_activations:
        raise ConfigurationError(
            "--activations 8 is for int8 and FP8 weights with a scale for each output, on a device "
            "whose units multiply them; this model has none: leave it out."
        )
    return model


def _load_guesser(
    folder: Path,
    config: ModelConfig,
    model: Decoder,
    target: _Target,
    encoding: Encoding | None,
) -> TorchHeads | TorchEagle:
    """Load what guesses for a model; on the rank that chooses tokens, which is alone with it."""
    base = model.spec
    spec = read_heads(folder, hidden=base.hidden_size, vocabulary=base.vocab_size)

    @contextmanager
    def whole_model() -> Iterator[DecoderLoader]:
        alone = replace(target, group=None)
        opened = open_checkpoint(config, base.names.base, encoding=encoding, writable=True)
        with opened as checkpoint, torch.inference_mode():
            yield DecoderLoader(base, alone.weights(checkpoint))

    def whole_embedding() -> torch.Tensor:
        if model.ranks is None:
            return model.embedding
        with whole_model() as loader:
            return loader.weight(outer_refs(base).embedding)

    def whole_head() -> Linear:
        with whole_model() as loader:
            return loader.head(loader.weight(outer_refs(base).embedding))

    if isinstance(spec, EagleSpec):
        check_hidden_states(folder, base)
        model.taps = spec.taps(len(model.layers))
        return load_eagle(
            spec,
            vocabulary=base.vocab_size,
            dtype=target.dtype,
            device=target.device,
            embedding=whole_embedding,
        )
    return load_heads(spec, model, dtype=target.dtype, device=target.device, whole_head=whole_head)


def _adapters(
    settings: ShardSettings, decoder: Decoder, target: _Target
) -> DeviceAdapters | TorchAdapters | None:
    """Return what loads adapters, where any are to be served; raises ConfigurationError."""
    if not settings.max_lora_rank:
        return None
    rank = target.ranks.rank if target.ranks else 0
    if runs_kernels(target.device):
        return DeviceAdapters(
            decoder,
            target.dtype,
            target.device,
            max_rank=settings.max_lora_rank,
            slots=settings.max_loaded_adapters,
            rank=rank,
            world_size=target.world_size,
        )
    return TorchAdapters(
        decoder,
        target.dtype,
        target.device,
        max_rank=settings.max_lora_rank,
        rank=rank,
        world_size=target.world_size,
    )


def _load_t5(
    config: ModelConfig,
    spec: T5Spec,
    target: _Target,
    sampler: RowSampler,
    encoding: Encoding | None,
) -> TorchRunner:
    """Load an encoder-decoder; raises ModelLoadError as `load_torch_runner` does."""
    began = time.monotonic_ns()
    opened = open_checkpoint(config, writable=True, encoding=encoding)
    with opened as checkpoint, torch.inference_mode():
        model = load_t5(spec, target.weights(checkpoint), target.ranks)
        model.pack()
    return TorchRunner(
        model,
        config,
        dtype=target.dtype,
        device=target.device,
        sampler=DecoderSampler(sampler, spec.start_token),
        attention=T5Layout(),
        ranks=target.ranks,
        load_ns=time.monotonic_ns() - began,
    )


def _load_fallback(
    config: ModelConfig, target: _Target, sampler: RowSampler, trust_remote_code: bool
) -> Runner:
    """Load a model through transformers, which is imported for it alone."""
    if target.world_size > 1:
        raise ModelLoadError(split_refusal(config))
    from tgi_trio.shard.torch_backend.fallback.fallback_runner import FallbackRunner

    return FallbackRunner.load(
        config,
        dtype=target.dtype,
        device=target.device,
        sampler=sampler,
        trust_remote_code=trust_remote_code,
    )
