"""Kernels that have shown on this machine that they compute the right thing."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from tgi_trio.model.config import ModelConfig
from tgi_trio.model.spec import DecoderSpec
from tgi_trio.shard.numba_backend import (
    adapter_self_test,
    kind_self_test,
    latent_self_test,
    mixture_self_test,
    padding_self_test,
    rare_self_test,
    sampler_self_test,
    self_test,
    state_self_test,
    stream_self_test,
)
from tgi_trio.shard.numba_backend.instructions import variant_for
from tgi_trio.shard.numba_backend.kernels.adapters import AdapterKernels, compile_adapter_kernels
from tgi_trio.shard.numba_backend.kernels.apart import compile_apart, compile_entry
from tgi_trio.shard.numba_backend.kernels.latents import run_latents
from tgi_trio.shard.numba_backend.kernels.padding import run_padding
from tgi_trio.shard.numba_backend.kernels.quantised.link import (
    PanelKernel,
    compile_panel_kernel,
    is_compiled,
)
from tgi_trio.shard.numba_backend.kernels.quantised.multiplier import Multiplier
from tgi_trio.shard.numba_backend.kernels.rare import run_rare
from tgi_trio.shard.numba_backend.kernels.sampling.rows import work_on_rows
from tgi_trio.shard.numba_backend.kernels.streams import run_streams
from tgi_trio.shard.numba_backend.kernels.variant import Variant
from tgi_trio.shard.numba_backend.numba_sampler import CpuSampler
from tgi_trio.shard.numba_backend.parallel_compilation import compile_in_parallel, run_in_parallel
from tgi_trio.shard.numba_backend.unsupported import UnsupportedError
from tgi_trio.shard.sampling.base import RowSampler
from tgi_trio.shard.sampling.logits_processors import GrammarMasks, Watermark


def choose_variant(
    spec: DecoderSpec,
    dtype: str,
    *,
    int8: bool,
    multipliers: Sequence[Multiplier] = (),
    kv_dtype: str | None = None,
    mixes: bool = False,
    keeps_states: bool = False,
) -> Variant:
    """Return how to compile for a model; raises UnsupportedError if no kernels work.

    Compiles them, and those of the sampler, of `multipliers` and, where the model `mixes` experts
    or `keeps_states`, of these beside them, where the cache does not have them yet.
    """
    reason, others = "", [each for each in multipliers if not is_compiled(each)]
    words = [[kind_self_test.__name__, each.kind.name, str(each.active_bits)] for each in others]
    likely = variant_for(spec, dtype, int8=int8, kv_dtype=kv_dtype)
    if mixes and (mixing := mixture_self_test.words(likely)):
        words.append(mixing)
    if keeps_states and (keeping := state_self_test.words(likely)):
        words.append(keeping)
    with (
        compile_in_parallel(work_on_rows, sampler_self_test.__name__),
        run_in_parallel(words),
    ):
        for dot in (True, False) if variant_for(spec, dtype, int8=int8).dot else (False,):
            made = variant_for(spec, dtype, int8=int8, dot=dot, kv_dtype=kv_dtype)
            try:
                found = self_test.find_fault(dtype, made)
            except Exception as error:  # whatever numba and LLVM raise: there are other backends
                found = f"{type(error).__name__}: {error}"
            if found is None:
                return made
            reason = f"the self-test of the kernels failed: {found}"
            print(reason, file=sys.stderr)
    raise UnsupportedError(reason)


def choose_panel_kernels(multipliers: Iterable[Multiplier]) -> dict[str, PanelKernel]:
    """Return kernels for quantised weights by the names of their kinds.

    Raises UnsupportedError for one that does not work.
    """
    kernels = {}
    for multiplier in multipliers:
        try:
            kernel = compile_panel_kernel(multiplier)
            fault = kind_self_test.find_fault(kernel)
        except Exception as error:  # as in `choose_variant`
            fault = f"{type(error).__name__}: {error}"
        if fault is not None:
            raise UnsupportedError(f"the self-test of the kernels failed: {fault}")
        kernels[multiplier.kind.name] = kernel
    return kernels


def choose_adapter_kernels(variant: Variant) -> AdapterKernels:
    """Return what computes adapters; raises UnsupportedError if it does not work."""
    try:
        kernels = compile_adapter_kernels(variant)
        fault = adapter_self_test.find_fault(variant, kernels)
    except Exception as error:  # as in `choose_variant`
        fault = f"{type(error).__name__}: {error}"
    if fault is not None:
        raise UnsupportedError(f"the self-test of the kernels failed: {fault}")
    return kernels


def choose_mixture_kernel(dtype: str, variant: Variant) -> int:
    """Return the address of what computes mixtures; raises UnsupportedError if it does not work."""
    try:
        kernel = mixture_self_test.compile_mixtures(variant)
        fault = mixture_self_test.find_fault(dtype, variant, kernel)
    except Exception as error:  # as in `choose_variant`
        fault = f"{type(error).__name__}: {error}"
    if fault is not None:
        raise UnsupportedError(f"the self-test of the kernels of mixtures failed: {fault}")
    return kernel


def choose_rare_kernel(variant: Variant) -> int:
    """Return the address of what few families have; raises UnsupportedError if it does not work."""
    try:
        kernel = compile_apart(run_rare, variant)
        fault = rare_self_test.find_fault(variant)
    except Exception as error:  # as in `choose_variant`
        fault = f"{type(error).__name__}: {error}"
    if fault is not None:
        raise UnsupportedError(f"the self-test of the kernels failed: {fault}")
    return kernel


def choose_stream_kernel(variant: Variant) -> int:
    """Return the address of what several hidden states need; raises UnsupportedError if it does not
    work.
    """
    try:
        kernel = compile_apart(run_streams, variant)
        fault = stream_self_test.find_fault(variant)
    except Exception as error:  # as in `choose_variant`
        fault = f"{type(error).__name__}: {error}"
    if fault is not None:
        raise UnsupportedError(f"the self-test of the kernels of hidden states failed: {fault}")
    return kernel


def choose_padding_kernel(variant: Variant) -> int:
    """Return the address of what heads need that fill no panels; raises UnsupportedError if it does
    not work.
    """
    try:
        kernel = compile_apart(run_padding, variant)
        fault = padding_self_test.find_fault(variant)
    except Exception as error:  # as in `choose_variant`
        fault = f"{type(error).__name__}: {error}"
    if fault is not None:
        raise UnsupportedError(f"the self-test of the kernels of narrow heads failed: {fault}")
    return kernel


def choose_state_kernel(variant: Variant) -> int:
    """Return the address of what keeps states; raises UnsupportedError if it does not work."""
    try:
        kernel = state_self_test.compile_states(variant)
        fault = state_self_test.find_fault(variant)
    except Exception as error:  # as in `choose_variant`
        fault = f"{type(error).__name__}: {error}"
    if fault is not None:
        raise UnsupportedError(f"the self-test of the kernels of states failed: {fault}")
    return kernel


def choose_latent_kernel(variant: Variant) -> int:
    """Return the address of what is around attention over latents; raises UnsupportedError if it
    does not work.
    """
    try:
        kernel = compile_entry(run_latents, latent_self_test.of_latents(variant))
        fault = latent_self_test.find_fault(variant)
    except Exception as error:  # as in `choose_variant`
        fault = f"{type(error).__name__}: {error}"
    if fault is not None:
        raise UnsupportedError(f"the self-test of the kernels of latents failed: {fault}")
    return kernel


def choose_sampler(
    config: ModelConfig,
    cores: list[int],
    grammars: GrammarMasks | None,
    watermark: Watermark | None = None,
) -> RowSampler:
    """Return the kernels' sampler, or torch's where they do not work."""
    try:
        reason = sampler_self_test.find_fault()
    except Exception as error:  # as in `choose_variant`
        reason = f"{type(error).__name__}: {error}"
    size, eos_ids = config.vocab_size, config.eos_ids
    if reason is None:
        return CpuSampler(size, eos_ids, cores=cores, grammars=grammars, watermark=watermark)
    print(f"tokens are chosen with torch, not with the CPU kernels: {reason}", file=sys.stderr)
    import torch

    from tgi_trio.shard.torch_backend.sampling.torch_sampler import Sampler

    torch.set_num_threads(1)  # its own team would go on spinning on our cores
    return Sampler(size, eos_ids, torch.device("cpu"), grammars=grammars, watermark=watermark)
