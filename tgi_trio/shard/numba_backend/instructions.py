"""How the kernels are compiled for a model on this machine."""

from __future__ import annotations

import llvmlite.binding as llvm
from numba import config

from tgi_trio.model.spec import DecoderSpec
from tgi_trio.shard.numba_backend.kernels.variant import Variant
from tgi_trio.shard.numba_backend.weight_layout import LANES, Storage

# Processors whose bfloat16 dot product is faster than two float32 multiply-adds. Intel's takes
# longer (measured on an Emerald Rapids: 74 against 107 GFLOP/s), and rounds the activations.
_FAST_DOT = ("znver",)
_MOST_HEADS = 8  # that attend together: two blocks of scores for each fill half of the registers
_VALUE_TILE = 16  # vectors of a tile of values


def has(feature: str) -> bool:
    """Return whether the compiler may use an instruction set, by LLVM's name for it.

    That is what the machine has, or what $NUMBA_CPU_FEATURES lists.
    """
    given: str | None = getattr(config, "CPU_FEATURES")  # noqa: B009, set when numba is imported
    if given is not None:
        return f"+{feature}" in given.split(",")
    return bool(llvm.get_host_cpu_features().get(feature))


def has_dot() -> bool:
    """Return whether this machine multiplies pairs of bfloat16."""
    return has("avx512bf16")


def variant_for(
    spec: DecoderSpec, dtype: str, *, int8: bool = False, dot: bool | None = None
) -> Variant:
    """Return how to compile for this model and this machine.

    `int8`: linear weights of 8 bits; activations are float32 then. `dot`: whether to use bfloat16
    dot products; None: where the machine is fast at them.
    """
    if dot is None:
        dot = has_dot() and llvm.get_host_cpu_name().startswith(_FAST_DOT)
    kv = Storage(dtype, dot=dot and dtype == "bfloat16" and not int8)
    group = spec.heads // spec.kv_heads
    heads = next(n for n in range(min(group, _MOST_HEADS), 0, -1) if group % n == 0)
    return Variant(
        weights=Storage("int8") if int8 else kv,
        kv=kv,
        heads=heads,
        value_vectors=4 if heads * 4 <= _VALUE_TILE and spec.head_dim % (4 * LANES) == 0 else 2,
        rows=8 if has("avx512f") else 2,
    )
