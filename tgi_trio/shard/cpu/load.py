"""From a model folder to a CpuRunner, or to the reason why there is none."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tgi_trio.shard.cores import sensible_threads, usable_cores
from tgi_trio.shard.cpu import sampler_self_test, self_test
from tgi_trio.shard.cpu.checkpoint import Checkpoint
from tgi_trio.shard.cpu.compile_beside import compiled_beside
from tgi_trio.shard.cpu.fitting import misfit, variant_for
from tgi_trio.shard.cpu.forward import Forward
from tgi_trio.shard.cpu.kernels.sampling.rows import work_on_rows
from tgi_trio.shard.cpu.runner import CpuRunner
from tgi_trio.shard.cpu.sampler import CpuSampler
from tgi_trio.shard.logits_processors import Grammars
from tgi_trio.shard.model_config import ModelConfig
from tgi_trio.shard.models.specs import DecoderSpec
from tgi_trio.shard.sampling import RowSampler


class UnfitError(Exception):
    """The kernels cannot run this model, or not on this machine."""


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
    page cache again as they are packed, but for the embedding's rows. Raises UnfitError, before any
    weight is read, when the kernels do not fit or fail their self-test; ModelLoadError for a
    checkpoint that cannot be used.
    """
    began = time.monotonic_ns()
    reason = misfit(spec, dtype)
    if spec is None or reason is not None:
        raise UnfitError(reason)
    with compiled_beside(work_on_rows, sampler_self_test.__name__):
        dot = _working_dot(spec, dtype, int8)
    cores = usable_cores()
    count = threads or sensible_threads(config.folder, len(cores))
    forward = Forward(
        spec,
        Checkpoint(
            config.folder,
            spec.names.base,
            given_back=fresh_files,
            kept=[f"{spec.names.embedding}.weight"],
        ),
        dtype,
        cores[:count],
        int8=int8,
        dot=dot,
    )
    sampler = _working_sampler(config, cores[:threads], grammars)
    return CpuRunner(
        config, forward, dtype=dtype, sampler=sampler, load_ns=time.monotonic_ns() - began
    )


def _working_sampler(
    config: ModelConfig, cores: list[int], grammars: Grammars | None
) -> RowSampler:
    """Return the kernels' sampler, or torch's where they do not work."""
    try:
        reason = sampler_self_test.fault()
    except Exception as error:  # as in `_working_dot`
        reason = f"{type(error).__name__}: {error}"
    size, eos_ids = config.vocab_size, config.eos_ids
    if reason is None:
        return CpuSampler(size, eos_ids, cores=cores, grammars=grammars)
    print(f"tokens are chosen with torch, not with the CPU kernels: {reason}", file=sys.stderr)
    import torch

    from tgi_trio.shard.sampler import Sampler

    torch.set_num_threads(1)  # its own team would go on spinning on our cores
    return Sampler(size, eos_ids, torch.device("cpu"), grammars=grammars)


def _working_dot(spec: DecoderSpec, dtype: str, int8: bool) -> bool:
    """Return whether to use bfloat16 dot products; raises UnfitError if no kernels work."""
    reason = ""
    for dot in (True, False) if variant_for(spec, dtype, int8=int8).dot else (False,):
        try:
            found = self_test.fault(spec, dtype, int8=int8, dot=dot)
        except Exception as error:  # whatever numba and LLVM raise: there are other backends
            found = f"{type(error).__name__}: {error}"
        if found is None:
            return dot
        reason = f"the self-test of the kernels failed: {found}"
        print(reason, file=sys.stderr)
    raise UnfitError(reason)
