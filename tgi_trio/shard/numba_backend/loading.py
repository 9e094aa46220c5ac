"""From a model folder to a CpuRunner, or to the reason why there is none. No numba at first."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from tgi_trio.shard.cores import sensible_threads, usable_cores
from tgi_trio.shard.cpu.checkpoint import Checkpoint
from tgi_trio.shard.cpu.fitting import UnfitError, misfit
from tgi_trio.shard.cpu.program import packing
from tgi_trio.shard.logits_processors import Grammars
from tgi_trio.shard.model_config import ModelConfig
from tgi_trio.shard.models.specs import DecoderSpec

if TYPE_CHECKING:
    from tgi_trio.shard.cpu.runner import CpuRunner


def load(
    config: ModelConfig,
    spec: DecoderSpec | None,
    *,
    dtype: str,
    int8: bool = False,
    grammars: Grammars | None = None,
    threads: int | None = None,
    fresh_files: frozenset[Path] = frozenset(),
) -> CpuRunner:
    """Load a checkpoint into a runner with `threads` threads (None: what its size is worth).

    `int8`: its linear layers' weights are quantised to 8 bits on the way. `fresh_files` leave the
    page cache again as they are packed, but for the embedding's rows. Raises UnfitError when the
    kernels do not fit, or fail their self-test; ModelLoadError for a checkpoint that cannot be
    used.
    """
    began = time.monotonic_ns()
    reason = misfit(spec, dtype)
    if spec is None or reason is not None:
        raise UnfitError(reason)
    cores = usable_cores()
    count = threads or sensible_threads(config.folder, len(cores))
    embedding = f"{spec.names.embedding}.weight"
    checkpoint = Checkpoint(
        config.folder, spec.names.base, given_back=fresh_files, kept=[embedding]
    )
    with packing(spec, checkpoint, dtype, int8=int8, threads=count) as program:
        # numba and the self-tests take a second of one core: the weights are packed meanwhile.
        from tgi_trio.shard.cpu.forward import Forward
        from tgi_trio.shard.cpu.runner import CpuRunner
        from tgi_trio.shard.cpu.working import working_sampler, working_variant

        variant = working_variant(spec, dtype, int8=int8)
        sampler = working_sampler(config, cores[:threads], grammars)
    forward = Forward(program, variant, cores[:count])
    return CpuRunner(
        config, forward, dtype=dtype, sampler=sampler, load_ns=time.monotonic_ns() - began
    )
