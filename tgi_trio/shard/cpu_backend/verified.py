"""Kernels that have passed their self-tests on this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import TypeVar

from tgi_trio.model.config import ModelConfig
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.shard.cpu_backend.adapter_kernels import AdapterKernels, open_adapter_kernels
from tgi_trio.shard.cpu_backend.cpu_sampler import CpuSampler
from tgi_trio.shard.cpu_backend.instructions import (
    find_variant,
    has_code_unit,
    has_matrix_unit,
    list_pairs,
    suits_code_unit,
)
from tgi_trio.shard.cpu_backend.kernel_groups import KernelGroup
from tgi_trio.shard.cpu_backend.matrix_unit import find_refusal
from tgi_trio.shard.cpu_backend.multiplier import Multiplier
from tgi_trio.shard.cpu_backend.panel_kernel import PanelKernel, open_panel_kernel
from tgi_trio.shard.cpu_backend.self_tests import adapted_latents as head_self_test
from tgi_trio.shard.cpu_backend.self_tests import adapters as adapter_self_test
from tgi_trio.shard.cpu_backend.self_tests import kinds as kind_self_test
from tgi_trio.shard.cpu_backend.self_tests import sampler as sampler_self_test
from tgi_trio.shard.cpu_backend.self_tests import step as self_test
from tgi_trio.shard.cpu_backend.unsupported import UnsupportedError
from tgi_trio.shard.cpu_backend.variant import Variant
from tgi_trio.shard.cpu_backend.weight_layout import Pairs
from tgi_trio.shard.sampling.base import RowSampler
from tgi_trio.shard.sampling.logits_processors import GrammarMasks, Watermark

Kernels = TypeVar("Kernels")


def choose_variant(
    spec: DecoderSpec,
    dtype: str,
    *,
    int8: bool,
    kv_dtype: str | None = None,
) -> Variant:
    """Return how to compile for a model; raises UnsupportedError if no kernels work."""
    reason = ""
    if dtype == "bfloat16" and not int8 and has_matrix_unit():
        tell_of_refusal()
    likely = find_variant(spec, dtype, int8=int8)
    ways: list[Pairs] = list_pairs() if likely.dot else ["float32"]
    for pairs in ways:
        made = find_variant(spec, dtype, int8=int8, pairs=pairs, kv_dtype=kv_dtype)
        try:
            found = self_test.find_fault(dtype, made)
        except Exception as error:  # any error of the compiler or LLVM: there is another backend
            found = f"{type(error).__name__}: {error}"
        if found is None:
            return made
        reason = f"the self-test of the kernels failed: {found}"
        print(reason, file=sys.stderr)
    raise UnsupportedError(reason)


@cache
def tell_of_refusal() -> None:
    """Say once that this process may not use the processor's matrix unit, if that is so."""
    if reason := find_refusal():
        print(f"AMX, this processor's matrix unit, is not used: {reason}", file=sys.stderr)


def choose_panel_kernels(multipliers: Iterable[Multiplier]) -> dict[str, PanelKernel]:
    """Return kernels for quantised weights by the names of their kinds.

    Raises UnsupportedError for one that does not work.
    """
    chosen = list(multipliers)
    if has_code_unit() and any(map(suits_code_unit, chosen)):
        tell_of_refusal()
    return {
        each.kind.name: _verify(
            "kernels", partial(open_panel_kernel, each), kind_self_test.find_fault
        )
        for each in chosen
    }


def choose_adapter_kernels(variant: Variant, *, of_heads: bool) -> AdapterKernels:
    """Return the kernels of adapters; raises UnsupportedError if they do not work.

    `of_heads`: adapters change what expands latents.
    """

    def find_fault(made: AdapterKernels) -> str | None:
        fault = adapter_self_test.find_fault(variant, made)
        return fault or (head_self_test.find_fault(variant, made) if of_heads else None)

    return _verify("kernels", lambda: open_adapter_kernels(variant), find_fault)


def open_kernel_group(group: KernelGroup, variant: Variant) -> int:
    """Return the entry's address for these operations; raises UnsupportedError if it fails."""
    return _verify(
        group.kernels, lambda: group.open(variant), lambda made: group.find_fault(variant)
    )


def _verify(
    name: str, compile_all: Callable[[], Kernels], find_fault: Callable[[Kernels], str | None]
) -> Kernels:
    """Compile and test kernels; return them, or raise UnsupportedError with their name."""
    try:
        kernels = compile_all()
        fault = find_fault(kernels)
    except Exception as error:  # as in `choose_variant`
        fault = f"{type(error).__name__}: {error}"
    if fault is not None:
        raise UnsupportedError(f"the self-test of the {name} failed: {fault}")
    return kernels


def choose_sampler(
    config: ModelConfig,
    cores: list[int],
    grammars: GrammarMasks | None,
    watermark: Watermark | None = None,
) -> RowSampler:
    """Return the kernels' sampler, or torch's if the kernels do not work."""
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

    torch.set_num_threads(1)  # its threads would keep spinning on our cores
    return Sampler(size, eos_ids, torch.device("cpu"), grammars=grammars, watermark=watermark)
