"""Loads a model folder into the torch runner that serves it.

The generic decoder serves families in our table, the T5 model its kin, and transformers the rest;
the worker loop sees a `Runner` in each case.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from tgi_trio.errors import ConfigurationError, ModelLoadError
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.model.check import (
    activations_refusal,
    check_checkpoint,
    check_kv_cache,
    check_rotary,
    heads_refusal,
    model_spec,
    rounding_refusal,
    stages_refusal,
)
from tgi_trio.model.config import ModelConfig, RopeScaling
from tgi_trio.model.quantised.recognise import find_made
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.model.specs.t5 import T5Spec
from tgi_trio.model.speculators.recognise import find_kind
from tgi_trio.model.tensors import decoder_matrices
from tgi_trio.settings.records import MTP
from tgi_trio.shard.checkpoint.lookup import open_checkpoint
from tgi_trio.shard.checkpoint.rounding.choose import ENCODINGS
from tgi_trio.shard.checkpoint.rounding.encoding import Encoding
from tgi_trio.shard.machine.cores import sensible_threads
from tgi_trio.shard.machine.dtypes import compute_dtype
from tgi_trio.shard.runner import Runner
from tgi_trio.shard.sampling.base import RowSampler
from tgi_trio.shard.sampling.decoder_sampler import DecoderSampler
from tgi_trio.shard.sampling.logits_processors import GrammarMasks, Watermark
from tgi_trio.shard.torch_backend.adapters.torch_adapters import refuse_adapters
from tgi_trio.shard.torch_backend.compiling.ahead import begin_early
from tgi_trio.shard.torch_backend.device_parts import rehearse_choices, warn_no_graphs
from tgi_trio.shard.torch_backend.loading.decoder_runner import make_decoder_runner
from tgi_trio.shard.torch_backend.loading.draft_module import load_draft_module
from tgi_trio.shard.torch_backend.loading.invariance import check_invariance, check_loaded
from tgi_trio.shard.torch_backend.loading.target import LoadTarget
from tgi_trio.shard.torch_backend.models.decoder import Decoder, Ranks
from tgi_trio.shard.torch_backend.models.decoder_loading import load_decoder, load_stage
from tgi_trio.shard.torch_backend.models.t5 import T5Layout
from tgi_trio.shard.torch_backend.models.t5_loading import load_t5
from tgi_trio.shard.torch_backend.sampling.torch_sampler import Sampler
from tgi_trio.shard.torch_backend.torch_device import resolve_device
from tgi_trio.shard.torch_backend.torch_runner import TorchRunner


def load_torch_runner(
    settings: ShardSettings,
    config: ModelConfig,
    *,
    device: str = "cpu",
    ranks: Ranks | None = None,
    sampler: RowSampler | None = None,
    grammars: GrammarMasks | None = None,
    graph_sizes: tuple[int, ...] = (),
    fresh_files: frozenset[Path] = frozenset(),
) -> Runner:
    """Load `settings.model_path`, as written by `save_pretrained`; `config` is what it states.

    `device`: a torch device's name; `graph_sizes`: batch sizes whose decodes are recorded, if the
    device and the model allow it. `sampler` None: make one for the model, which serves `grammars`,
    or refuses grammars if there are none. With `ranks`, this rank's part is loaded. `fresh_files`
    are dropped from the page cache as they are packed. Raises ModelLoadError for files that cannot
    be used, ConfigurationError for settings that cannot.
    """
    began = time.monotonic_ns()
    where = resolve_device(device)
    target = _find_target(settings, config, where, ranks)
    if target.stages > 1:
        warn_no_graphs(graph_sizes, "other ranks compute layers of each step")
        graph_sizes = ()
    torch.set_num_threads(_count_threads(settings, target.world_size))
    sampler = sampler or _make_sampler(settings, config, where, grammars)
    spec = _checked_spec(config, settings.rope)
    check_invariance(settings, spec, where)
    made = find_made(config, settings.quantize)
    encoding = None if made is None else ENCODINGS[made]
    kind = None if settings.draft_model is None else find_kind(settings.draft_model)
    if spec is not None:  # other models launch no kernels of ours
        begin_early(where)
    if isinstance(spec, DecoderSpec):
        rehearse_choices(sampler, config, where, target.dtype)
        model = _load_decoder(config, spec, target, fresh_files, encoding)
        check_loaded(settings, model, where)
        leads = ranks is None or ranks.rank == 0
        heads = load_draft_module(settings, config, model, target, encoding) if leads else None
        return make_decoder_runner(
            model,
            settings,
            config,
            target,
            sampler,
            graph_sizes,
            heads,
            began,
            ahead=target.stages == 1
            and settings.drafter != MTP
            and (kind is None or not kind.goes_on),
        )
    _refuse_what_decoders_have(settings, config, heads=kind is not None)
    if isinstance(spec, T5Spec):
        warn_no_graphs(graph_sizes, "the model has an encoder")
        return _load_t5(config, spec, target, sampler, encoding)
    warn_no_graphs(graph_sizes, "the model runs through transformers")
    if made is not None:
        raise ConfigurationError(rounding_refusal(config, made))
    return _load_fallback(config, target, sampler, settings.trust_remote_code)


def _find_target(
    settings: ShardSettings, config: ModelConfig, device: torch.device, ranks: Ranks | None
) -> LoadTarget:
    dtype = compute_dtype(settings.dtype, config, on_cpu=device.type == "cpu")
    return LoadTarget(
        getattr(torch, dtype),
        device,
        ranks,
        stages=settings.pipeline_stages,
        active_bits=settings.activations or 16,
        invariant=settings.batch_invariant,
        adapted=settings.max_lora_rank > 0,
    )


def _refuse_what_decoders_have(
    settings: ShardSettings, config: ModelConfig, *, heads: bool
) -> None:
    """Raise ConfigurationError for settings that only our generic decoder serves.

    `heads`: whether trained heads are to draft for the model.
    """
    if settings.activations == 8:
        raise ConfigurationError(activations_refusal(config))
    if settings.max_lora_rank:
        raise refuse_adapters(
            f"of {config.model_type} models no linears are known by name, or it has an encoder"
        )
    if heads:
        raise ConfigurationError(heads_refusal(config))
    if settings.kv_cache_dtype is not None:
        check_kv_cache(config, None, settings.kv_cache_dtype)


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


def _count_threads(settings: ShardSettings, world_size: int) -> int:
    """Return how many threads torch is to have in this process."""
    if settings.cpu_threads:
        return settings.cpu_threads
    worth = sensible_threads(settings.model_path, torch.get_num_threads())
    return max(1, worth // world_size)


def _checked_spec(config: ModelConfig, rope: RopeScaling | None) -> DecoderSpec | T5Spec | None:
    """Return the spec of a model, None if transformers runs it; raises what `check_model` does."""
    spec = model_spec(config)
    check_checkpoint(config, spec)
    if rope is not None:
        check_rotary(config, spec)
    return spec


def _load_decoder(
    config: ModelConfig,
    spec: DecoderSpec,
    target: LoadTarget,
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
            model = load_stage(spec, source, target.stage, target.group, target.ranks)
        else:
            model = load_decoder(spec, source, target.ranks)
    if target.active_bits == 8 and not source.rounds_activations:
        raise ConfigurationError(
            "--activations 8 is for int8 and FP8 weights with a scale for each output, on a device "
            "whose units multiply them; this model has none: leave it out."
        )
    return model


def _load_t5(
    config: ModelConfig,
    spec: T5Spec,
    target: LoadTarget,
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
    config: ModelConfig, target: LoadTarget, sampler: RowSampler, trust_remote_code: bool
) -> Runner:
    """Load a model through transformers, which is imported only for that."""
    if target.stages > 1:
        raise ModelLoadError(stages_refusal(config))
    from tgi_trio.shard.torch_backend.fallback.fallback_runner import FallbackRunner

    return FallbackRunner.load(
        config,
        dtype=target.dtype,
        device=target.device,
        sampler=sampler,
        trust_remote_code=trust_remote_code,
        ranks=target.ranks,
    )
