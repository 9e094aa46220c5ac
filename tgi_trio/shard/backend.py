"""Chooses and loads a model's runner: the CPU kernels if they support it, otherwise torch.

torch takes two seconds to import, kernels that are compiled a quarter of a second: each is imported
only if it is used.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tgi_trio.errors import ConfigurationError
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.model.check import check_draft_model, model_spec
from tgi_trio.model.config import ModelConfig, read_config
from tgi_trio.model.fit.cpu_kernels import activations_error, kernels_error
from tgi_trio.model.quantised.recognise import check_stated
from tgi_trio.model.speculators.recognise import find_kind
from tgi_trio.shard.adapters.room import KeepsRoom, largest_adapter
from tgi_trio.shard.machine.device import CPU, graph_sizes, limit_memory
from tgi_trio.shard.ranks.follower import NoSampler
from tgi_trio.shard.runner import Runner
from tgi_trio.shard.speculation.drafted_runner import DraftedRunner, LeavesRoom

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from tgi_trio.shard.ranks.neighbours import Neighbours
    from tgi_trio.shard.ranks.portions import Portions
    from tgi_trio.shard.sampling.logits_processors import GrammarMasks
    from tgi_trio.shard.torch_backend.models.decoder import Ranks


def load_runner(
    settings: ShardSettings,
    *,
    device: str = CPU,
    ranks: Ranks | None = None,
    fresh_files: frozenset[Path] = frozenset(),
) -> Runner:
    """Load the model of `settings` on `device`, which `choose_device` has returned.

    With `ranks`, this rank's part is loaded; rank 0 alone samples. `fresh_files`: as
    `reading_ahead` yields them. Raises ConfigurationError for settings that cannot be served,
    ModelLoadError for a folder that cannot be used.
    """
    _check(settings, device)
    cores = os.sched_getaffinity(0)
    if settings.speculate == 0:  # nothing is to draft
        settings = replace(settings, draft_model=None, drafter=None)
    config = read_config(settings.model_path, settings.rope)
    runner = _load_model(settings, config, device=device, ranks=ranks, fresh_files=fresh_files)
    if settings.max_lora_rank and device == CPU and isinstance(runner, KeepsRoom):
        runner.bytes_per_adapter = largest_adapter(settings, config, runner.info.dtype)
    folder = settings.draft_model
    if folder is None or find_kind(folder) is not None or (ranks is not None and ranks.rank):
        return runner
    if not runner.info.speculates or not isinstance(runner, LeavesRoom):
        return runner  # the router says that it has no effect
    return _add_draft_model(runner, settings, folder, device, cores)


def _load_model(
    settings: ShardSettings,
    config: ModelConfig,
    *,
    device: str,
    ranks: Ranks | None,
    fresh_files: frozenset[Path],
) -> Runner:
    """Load the model itself, with its speculation heads, if any."""
    if settings.quantize is not None:
        check_stated(config, settings.quantize)
    limit_memory(device, settings.cuda_memory_fraction)
    sizes = graph_sizes(device, settings.cuda_graphs)
    chooses = ranks is None or ranks.rank == 0
    grammars = _grammars(settings.tokenizer_file, config) if chooses else None
    fresh_files = fresh_files if ranks is None else frozenset()  # the others read them, too
    if device == CPU and settings.cpu_backend != "torch":
        runner = _load_kernels(settings, config, grammars, fresh_files, ranks)
        if runner is not None:
            return runner
    from tgi_trio.shard.torch_backend.torch_loading import load_torch_runner

    return load_torch_runner(
        settings,
        config,
        device=device,
        ranks=ranks,
        sampler=None if chooses else NoSampler(),
        grammars=grammars,
        graph_sizes=sizes,
        fresh_files=fresh_files,
    )


def _add_draft_model(
    runner: LeavesRoom, settings: ShardSettings, folder: Path, device: str, cores: set[int]
) -> Runner:
    """Load a draft model beside `runner`, as a whole and on this rank.

    `cores`: this thread's, before `runner` was loaded. Raises what loading a model raises.
    """
    config = read_config(folder)
    check_draft_model(folder, model_spec(config))
    in_kernels = runner.info.backend.startswith("kernels")
    place, count = settings.place_on_machine
    own = replace(
        settings,
        model_path=folder,
        draft_model=None,
        drafter=None,
        speculate=None,
        tokenizer_file=None,
        quantize=None,
        max_lora_rank=0,
        kv_cache_dtype=None,
        activations=None,
        rope_scaling=None,
        rope_factor=None,
        # torch's threads must not inherit the one core of a team's first thread.
        cpu_backend="auto" if in_kernels else "torch",
        # Its processors are this rank's.
        local_rank=place,
        local_size=count,
        rank=0,
        world_size=1,
    )
    pinned, threads = os.sched_getaffinity(0), _torch_threads()
    os.sched_setaffinity(0, cores)
    try:
        draft = _load_model(own, config, device=device, ranks=None, fresh_files=frozenset())
    finally:
        os.sched_setaffinity(0, pinned)
    if not draft.info.backend.startswith("kernels") and device == CPU:
        import torch

        torch.set_num_threads(1 if in_kernels else threads)
    return DraftedRunner(runner, draft)


def _torch_threads() -> int:
    """Return how many threads torch has, 1 where it is not imported."""
    torch = sys.modules.get("torch")
    return 1 if torch is None else int(torch.get_num_threads())


def _load_kernels(
    settings: ShardSettings,
    config: ModelConfig,
    grammars: GrammarMasks | None,
    fresh_files: frozenset[Path],
    ranks: Ranks | None,
) -> Runner | None:
    """Load a model with the CPU kernels, or return why torch has to serve it.

    With `ranks`, this rank's part, of a stage if they form a pipeline; either all ranks use the
    kernels or none. Raises ConfigurationError if the kernels do not support the model and torch
    cannot serve.
    """
    from tgi_trio.shard.cpu_backend.loading import load_cpu_runner
    from tgi_trio.shard.cpu_backend.unsupported import UndividedError, UnsupportedError

    size, divided = settings.world_size, False
    neighbours: Neighbours | None = None
    portions: Portions | None = None
    if ranks is not None and settings.pipeline_stages > 1:
        neighbours = _find_neighbours(ranks, settings.pipeline_stages)
    if ranks is not None and ranks.parts is not None:
        portions = _find_portions(ranks.parts)
    others = neighbours or portions
    runner, reason = None, ""
    try:
        runner = load_cpu_runner(
            settings,
            config,
            grammars=grammars,
            fresh_files=fresh_files,
            sampler=NoSampler() if ranks is not None and ranks.rank else None,
            neighbours=neighbours,
            portions=portions,
        )
    except UnsupportedError as error:
        reason, divided = str(error), isinstance(error, UndividedError)
    if others is not None and not others.least(runner is not None) and runner is not None:
        runner.close()
        runner, reason = None, "another rank cannot compute its part with them"
    if runner is not None:
        return runner
    if settings.cpu_backend == "kernels":
        raise kernels_error(reason, size if divided else 1)
    print(f"served with torch, not with the CPU kernels: {reason}", file=sys.stderr)
    if settings.activations == 8:
        raise activations_error(reason, size if divided else 1)
    return None


def _find_neighbours(ranks: Ranks, stages: int) -> Neighbours:
    """Return the kernels' interface to the other stages of a pipeline."""
    from tgi_trio.shard.ranks.neighbours import Neighbours

    _quieten_torch()
    return Neighbours(ranks, stages)


def _find_portions(ranks: Ranks) -> Portions:
    """Return the kernels' interface to the other tensor-parallel ranks."""
    from tgi_trio.shard.ranks.portions import Portions

    _quieten_torch()
    return Portions(ranks)


def _quieten_torch() -> None:
    """Set up torch for communication among ranks alone: it computes nothing."""
    import torch

    torch.set_num_threads(1)


def _check(settings: ShardSettings, device: str) -> None:
    """Raise ConfigurationError for what the CPU kernels alone can do, where they cannot serve, and
    for what they cannot.
    """
    if device == CPU and settings.cpu_backend == "torch" and settings.activations == 8:
        raise activations_error(None)
    if device != CPU and settings.cpu_backend == "kernels":
        raise ConfigurationError(
            f"--cpu-backend kernels computes on the CPU, and this shard computes on {device}; "
            "leave it out, or hide the device: CUDA_VISIBLE_DEVICES="
        )


def _grammars(tokenizer: Path | None, config: ModelConfig) -> GrammarMasks | None:
    """Return the grammars' compiler; None if grammars are disabled."""
    if tokenizer is None:
        return None
    from tgi_trio.grammars.compiler import load_tokenizer
    from tgi_trio.shard.sampling.guides import Grammars

    def load(file: str, ends: tuple[int, ...]) -> LLTokenizer:
        every = dict.fromkeys((*config.eos_ids, *ends))
        return load_tokenizer(Path(file) if file else tokenizer, every, config.vocab_size)

    return Grammars(load)
