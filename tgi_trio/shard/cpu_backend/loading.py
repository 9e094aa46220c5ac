"""Loads a model folder into a CpuRunner, or returns why the kernels cannot serve it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from tgi_trio.ipc.shard_output import warn
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.model.adapters.sites import AdapterScope
from tgi_trio.model.check import check_checkpoint, check_rotary
from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.fit.cpu_kernels import explain_undivided, find_undivided, find_unsupported
from tgi_trio.model.matrices.decoder import outer_refs, table_refs
from tgi_trio.model.matrices.layer_work import find_run
from tgi_trio.model.matrices.references import every_unit
from tgi_trio.model.mtp_layers import MtpSpec
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.model.speculators.assistant import AssistantSpec
from tgi_trio.model.speculators.eagle import check_hidden_states
from tgi_trio.model.speculators.mtp import need_mtp
from tgi_trio.model.speculators.recognise import find_kind, read_heads
from tgi_trio.model.speculators.spec import EagleSpec, HeadsSpec
from tgi_trio.model.split import check_split
from tgi_trio.model.stages import check_stages
from tgi_trio.model.tensors import kv_scales
from tgi_trio.settings.records import MTP
from tgi_trio.shard.checkpoint.heads import open_heads
from tgi_trio.shard.checkpoint.lookup import Checkpoint, Weights, open_checkpoint, read_table
from tgi_trio.shard.checkpoint.rounding.choose import ENCODINGS
from tgi_trio.shard.cpu_backend.adapters import CpuAdapters
from tgi_trio.shard.cpu_backend.cpu_runner import CpuRunner
from tgi_trio.shard.cpu_backend.drafting.assistant_fit import refuse_unfit
from tgi_trio.shard.cpu_backend.drafting.heads import LoadedHeads
from tgi_trio.shard.cpu_backend.drafting.mtp import (
    MtpNorms,
    PackedMtp,
    find_lone,
    run_of_layers,
)
from tgi_trio.shard.cpu_backend.forward import Forward
from tgi_trio.shard.cpu_backend.instructions import (
    find_multiplier,
    find_variant,
    multiplies_codes,
    multiplies_pairs,
)
from tgi_trio.shard.cpu_backend.kernel_groups import find_kernel_groups
from tgi_trio.shard.cpu_backend.machine_code.parallel import Kernel, compile_in_parallel
from tgi_trio.shard.cpu_backend.multiplier import Multiplier
from tgi_trio.shard.cpu_backend.needed_kernels import list_kernels
from tgi_trio.shard.cpu_backend.program import Program, pack_program
from tgi_trio.shard.cpu_backend.tables import Code
from tgi_trio.shard.cpu_backend.target import FINE_BITS, Target, find_target
from tgi_trio.shard.cpu_backend.unsupported import UndividedError, UnsupportedError
from tgi_trio.shard.cpu_backend.variant import Variant
from tgi_trio.shard.cpu_backend.verified import (
    choose_adapter_kernels,
    choose_panel_kernels,
    choose_sampler,
    choose_variant,
    open_kernel_group,
)
from tgi_trio.shard.cpu_backend.weight_layout import CacheNumbers
from tgi_trio.shard.sampling.base import RowSampler
from tgi_trio.shard.sampling.logits_processors import GrammarMasks, Watermark

_OF_HEADS: Final = "eetq"  # with a scale for each row

if TYPE_CHECKING:
    from tgi_trio.shard.ranks.neighbours import Neighbours
    from tgi_trio.shard.ranks.portions import Portions


def load_cpu_runner(
    settings: ShardSettings,
    config: ModelConfig,
    *,
    grammars: GrammarMasks | None = None,
    fresh_files: frozenset[Path] = frozenset(),
    sampler: RowSampler | None = None,
    neighbours: Neighbours | None = None,
    portions: Portions | None = None,
    report: Callable[[str], None] = warn,
) -> CpuRunner:
    """Load the checkpoint of `config`. `sampler` None: a sampler of the kernels, with `grammars`.

    Speculation heads are loaded from `settings.draft_model`, if it has any. With `neighbours`, this
    stage of a pipeline is loaded; with `portions`, this rank's portion of every layer. `report` is
    told of compiled kernels that could not be kept.

    `fresh_files` are dropped from the page cache as they are packed, except embedding rows. Raises
    UnsupportedError if the kernels do not fit or fail their self-test, ModelLoadError for a
    checkpoint that cannot be used, ConfigurationError for unsupported rotary settings.
    """
    began = time.monotonic_ns()
    target = find_target(settings, config, neighbours, portions)
    spec = _find_spec(target)
    heads = _load_heads(settings, spec)
    mtp = need_mtp(config, spec) if settings.drafter == MTP else ()
    with (
        nullcontext() if heads is None else _open_heads(target, heads.spec) as head_files,
        _open_weights(target, spec, fresh_files) as checkpoint,
        _pack(target, spec, checkpoint, find_lone(heads, head_files, mtp, checkpoint)) as program,
        _pack_mtp(target, mtp, checkpoint) as layers,
    ):
        _lend_embedding(heads, spec, checkpoint, program)
        # Weights are packed while kernels are loaded, or compiled, and tested.
        multipliers = _find_multipliers(target, program)
        with compile_in_parallel(_list_kernels(target, program, multipliers), report):
            variant = _link(target, program, multipliers)
            _link_mtp(target, layers, variant)
            adapters = _link_adapters(target, program, variant)
            sampler = sampler or _make_sampler(target, grammars)
    cores = target.cores[: target.threads]
    forward = Forward(program, variant, cores, neighbours, portions)
    return CpuRunner(
        config,
        forward,
        dtype=target.dtype,
        sampler=sampler,
        load_ns=time.monotonic_ns() - began,
        heads=heads,
        mtp=[layer.start(forward, cores, i) for i, layer in enumerate(layers)],
        adapters=adapters,
        ranks=neighbours or portions,
        local_ranks=settings.place_on_machine[1],
    )


def _pack(
    target: Target,
    spec: DecoderSpec,
    checkpoint: Checkpoint,
    lone: tuple[HeadsSpec, Weights] | None,
) -> AbstractContextManager[Program]:
    """Pack the model's layers, and `lone` linears of what drafts, as `pack_program` does."""
    settings = target.settings
    return pack_program(
        spec,
        checkpoint,
        target.dtype,
        int8=target.int8,
        int8_by_rows=multiplies_codes(),
        threads=target.threads,
        heads=lone,
        max_lora_rank=settings.max_lora_rank,
        scope=AdapterScope.of(settings.adapter_scope),
        kv=_cache_numbers(settings.kv_cache_dtype, spec, checkpoint),
        run=find_run(spec, target.stage),
        portion=target.portion,
    )


def _find_spec(target: Target) -> DecoderSpec:
    """Return the spec of what is computed, if the kernels can serve it; raises as loading does."""
    settings, config, ranks = target.settings, target.config, target.portion.ranks
    spec = decoder_spec(config)
    reason = find_unsupported(spec, target.dtype)
    if spec is None or reason is not None:
        raise UnsupportedError(reason)
    if settings.kv_cache_dtype and spec.index is not None and spec.index.pool:
        raise UnsupportedError("keys of runs of tokens, which an index chooses, have 8 bits")
    if ranks > 1:
        check_split(spec, ranks)
        reason = find_undivided(spec, ranks) or _find_whole(target)
        if reason is not None:
            raise UndividedError(reason)
    check_checkpoint(config, spec)
    if settings.rope is not None:
        check_rotary(config, spec)
    if target.stage is not None:
        check_stages(spec, target.stage.size)
    return spec


def _open_weights(target: Target, spec: DecoderSpec, fresh_files: frozenset[Path]) -> Checkpoint:
    """Open the model's weights.

    Rows of tables in `fresh_files` stay in the page cache, from which steps read them.
    """
    rounded = None if target.int8 else target.rounded
    return open_checkpoint(
        target.config,
        spec.names.base,
        given_back=fresh_files,
        kept=[piece.matrix.name for table in table_refs(spec) for piece in table.pieces],
        encoding=None if rounded is None else ENCODINGS[rounded],
    )


def _find_whole(target: Target) -> str | None:
    """Return which requested feature the kernels cannot split over ranks, or None."""
    settings = target.settings
    draft = settings.draft_model
    parts = {
        "adapters": settings.max_lora_rank > 0,
        "heads that draft": draft is not None and find_kind(draft) is not None,
        "layers that draft": settings.drafter == MTP,
        "images": target.config.get("vision_config") is not None,
        "weights that become int8": target.becomes_int8,  # rows have scales over all columns
    }
    return next((explain_undivided(name) for name, there in parts.items() if there), None)


def _find_multipliers(target: Target, program: Program) -> list[Multiplier]:
    """Return how each kind of weights that a program multiplies as stored is multiplied."""
    dot = target.settings.activations != FINE_BITS and multiplies_pairs(target.dtype)
    return [find_multiplier(kind, target.find_bits(kind), dot=dot) for kind in program.kinds]


def _list_kernels(
    target: Target, program: Program, multipliers: Sequence[Multiplier]
) -> list[Kernel]:
    """Return the kernels that will probably be loaded, without their fallbacks."""
    settings = target.settings
    # For the whole model, so that all stages have the same kernels.
    likely = find_variant(
        program.model, target.dtype, int8=target.int8, kv_dtype=settings.kv_cache_dtype
    )
    adapters = settings.max_lora_rank > 0
    return list_kernels(likely, multipliers, find_kernel_groups(program), adapters=adapters)


def _link(target: Target, program: Program, multipliers: Sequence[Multiplier]) -> Variant:
    """Compile or load the kernels of a program, and link them into its operations.

    Raises UnsupportedError if they fail their self-test.
    """
    settings = target.settings
    variant = choose_variant(
        program.model, target.dtype, int8=target.int8, kv_dtype=settings.kv_cache_dtype
    )
    _link_kernels(program, multipliers, variant)
    if settings.activations is not None and not program.has_stored_kinds:
        print(
            f"--activations {settings.activations} changes nothing: no weights of this "
            "model are multiplied as they are stored",
            file=sys.stderr,
        )
    return variant


def _link_mtp(target: Target, layers: Sequence[PackedMtp], variant: Variant) -> None:
    """Link the programs of layers of the model's own that draft."""
    for layer in layers:
        _link_kernels(layer.program, _find_multipliers(target, layer.program), variant)


def _link_kernels(program: Program, multipliers: Sequence[Multiplier], variant: Variant) -> None:
    """Link what a program needs beside the step's kernels of `variant`."""
    program.link(choose_panel_kernels(multipliers))
    for each in find_kernel_groups(program):
        program.link_kernel_group(each.codes, open_kernel_group(each, variant))


def _link_adapters(target: Target, program: Program, variant: Variant) -> CpuAdapters | None:
    """Link the kernels of adapters; return their host, or None if adapters are off."""
    settings = target.settings
    if not settings.max_lora_rank:
        return None
    of_heads = program.has((Code.SHRINK_HEADS,))
    program.link_adapters(choose_adapter_kernels(variant, of_heads=of_heads))
    scope = AdapterScope.of(settings.adapter_scope)
    return CpuAdapters(target.config, program, variant.kv, settings.max_lora_rank, scope)


def _make_sampler(target: Target, grammars: GrammarMasks | None) -> RowSampler:
    """Return the kernels' sampler, or torch's if the kernels fail their self-test."""
    settings = target.settings
    watermark = Watermark(settings.watermark_gamma, settings.watermark_delta)
    return choose_sampler(target.config, target.cores, grammars, watermark)


def _cache_numbers(
    word: str | None, spec: DecoderSpec, checkpoint: Checkpoint
) -> CacheNumbers | None:
    """Return how K and V are stored, with the checkpoint's scales; None: in the model's dtype."""
    if word is None:
        return None
    scales = []
    for index in range(len(spec.layers)):
        key, value = (checkpoint.number(names) for names in kv_scales(spec, index))
        scales.append((1.0 if key is None else key, 1.0 if value is None else value))
    return CacheNumbers(word, scales)


def _open_heads(target: Target, heads: HeadsSpec) -> Checkpoint:
    """Open the linear layers of heads, rounded to 8 bits: twice as fast, and they only draft.

    Not where packing rounds all weights anyway, nor for a drafter that continues from its own
    states.
    """
    exact = target.int8 or isinstance(heads, EagleSpec | AssistantSpec)
    return open_heads(heads, None if exact else ENCODINGS[_OF_HEADS])


@contextmanager
def _pack_mtp(
    target: Target, mtp: Sequence[MtpSpec], checkpoint: Checkpoint
) -> Iterator[list[PackedMtp]]:
    """Pack layers of the model's own that draft, as `pack_program` does.

    The step's kernels are those of the model's program.
    """
    with ExitStack() as packing:
        layers = []
        for spec in mtp:
            packed = pack_program(
                spec.decoder,
                checkpoint,
                target.dtype,
                int8=target.int8,
                int8_by_rows=multiplies_codes(),
                threads=target.threads,
                kv=_cache_numbers(target.settings.kv_cache_dtype, spec.decoder, checkpoint),
                run=run_of_layers(spec),
            )
            layers.append(PackedMtp(packing.enter_context(packed), MtpNorms(spec, checkpoint)))
        yield layers


def _lend_embedding(
    heads: LoadedHeads | None, spec: DecoderSpec, checkpoint: Checkpoint, program: Program
) -> None:
    """Give a drafter without its own embedding that of the model."""
    if heads is None or not isinstance(heads.spec, EagleSpec | AssistantSpec):
        return
    if "embedding" in heads.tables:
        return
    if program.embedding is not None:
        heads.tables["embedding"] = program.embedding
        return
    table = read_table(checkpoint, outer_refs(spec).embedding, every_unit).dequantised()
    heads.tables["embedding"] = np.array(table)  # a copy, since the file is closed


def _load_heads(settings: ShardSettings, spec: DecoderSpec) -> LoadedHeads | None:
    """Return the heads that are to draft without their linear layers; None: there are none."""
    folder = settings.draft_model
    if folder is None or find_kind(folder) is None:
        return None
    heads = read_heads(folder, hidden=spec.hidden_size, vocabulary=spec.vocab_size)
    if isinstance(heads, AssistantSpec):
        refuse_unfit(heads, spec, eight_bits=settings.kv_cache_dtype is not None)
    if isinstance(heads, EagleSpec):
        check_hidden_states(folder, spec)
    return LoadedHeads(heads, spec)
