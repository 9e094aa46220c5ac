"""Chooses how the kernels are compiled for a model on this machine."""

from __future__ import annotations

import math
import os
from dataclasses import replace

import llvmlite.binding as llvm

from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.shard.cpu_backend.kinds.kind import Kind
from tgi_trio.shard.cpu_backend.matrix_unit import find_refusal
from tgi_trio.shard.cpu_backend.multiplier import Dots, Multiplier, multiplies_bytes
from tgi_trio.shard.cpu_backend.operations.padded_heads import kept_sizes
from tgi_trio.shard.cpu_backend.variant import Variant
from tgi_trio.shard.cpu_backend.weight_layout import LANES, Pairs, Storage

# Processors whose bfloat16 dot product is faster than two float32 multiply-adds. Intel's is slower
# (measured on an Emerald Rapids: 74 against 107 GFLOP/s), and rounds the activations.
_FAST_DOT = ("znver",)
# most heads that attend together: two blocks of scores for each fill half of 32 registers; with 16
# of half the size a few at a time pass over keys and values, which are then in the nearest cache
_MOST_HEADS = 8
# most query heads of several tokens: two blocks of scores for each leave 8 registers
_MOST_ROWS = 12
_MOST_TOKENS = 4
_VALUE_TILE = 16  # vectors in a tile of values


def has(feature: str) -> bool:
    """Return whether the compiler may use an instruction set, by LLVM's name for it.

    That is one that the machine has, or that $KERNEL_CPU_FEATURES lists.
    """
    given = os.environ.get("KERNEL_CPU_FEATURES")
    if given is not None:
        return f"+{feature}" in given.split(",")
    return bool(llvm.get_host_cpu_features().get(feature))


def has_dot() -> bool:
    """Return whether this machine has a dot product of bfloat16 pairs."""
    return has("avx512bf16")


def has_matrix_unit() -> bool:
    """Return whether this machine has a matrix unit for bfloat16, and what goes with it."""
    return has("amx-tile") and has("amx-bf16") and has_dot()


def has_code_unit() -> bool:
    """Return whether this machine has a matrix unit for bytes."""
    return has("amx-tile") and has("amx-int8")


def multiplies_codes() -> bool:
    """Return whether this process may multiply bytes by the machine's matrix unit."""
    return has_code_unit() and find_refusal() is None


def has_amx() -> bool:
    """Return whether this process may use the machine's matrix unit."""
    return has_matrix_unit() and find_refusal() is None


def list_pairs() -> list[Pairs]:
    """Return the ways to multiply bfloat16 weights that suit this machine, fastest first.

    They depend on the processor, and not on a measurement: a shard that is replaced must compute
    what its predecessor computed.
    """
    if has_amx():
        return ["amx", "float32"]
    fast = has_dot() and llvm.get_host_cpu_name().startswith(_FAST_DOT)
    return ["dot", "float32"] if fast else ["float32"]


def dots() -> Dots:
    """Return the instructions for dot products of integers on this machine."""
    if has("avx512vnni") and has("avx512bw"):
        return "vnni"
    if has("avx512bw"):
        return "avx512"
    if has("avx2"):
        return "avx2"
    return "neon" if has("dotprod") else "plain"


def has_deep_caches() -> bool:
    """Return whether a single row of codes is read faster if it is fetched into both caches.

    So it is on Intel's processors with a matrix unit, and on no other has it been measured.
    """
    return has("amx-tile")


def find_multiplier(kind: Kind, active_bits: int = 8, *, dot: bool = False) -> Multiplier:
    """Return how weights of a kind are multiplied on this machine.

    `active_bits`: of activations, 8 or 16. If the kind's codes cannot be multiplied with 8 bits, 16
    are used. Codes that are not integers are multiplied in float32, or with `dot` as pairs of
    bfloat16 where those hold their numbers, by a matrix unit if this process may use one. The
    choice depends on kind, processor and dtype, never on the batch.
    """
    way, caches = dots(), has_deep_caches()
    if kind.by_rows:
        made = Multiplier(kind, active_bits, way, 16, half=True, both_caches=caches)
        return replace(made, matrix=multiplies_codes())
    if kind.floating:
        active_bits = 16 if dot and not kind.turned else 32
    elif not multiplies_bytes(way, kind.largest_code):
        active_bits = 16
    rows = 8 if way in ("vnni", "avx512", "neon") else 4
    half = has("f16c") or has("avx512f") or way == "neon"
    made = Multiplier(kind, active_bits, way, rows, half, both_caches=caches)
    if kind.floating:
        looks_up = active_bits == 32 and has("avx512vbmi")
        return replace(made, matrix=active_bits == 16 and has_amx(), looks_up=looks_up)
    return replace(made, matrix=suits_code_unit(made) and multiplies_codes())


def suits_code_unit(multiplier: Multiplier) -> bool:
    """Return whether a matrix unit for bytes multiplies such codes, where there is one."""
    whole = multiplier.active_bits == 8 and not multiplier.kind.floating
    return whole and multiplier.dots == "vnni"


def multiplies_pairs(dtype: str) -> bool:
    """Return whether codes that are not integers are multiplied as pairs of bfloat16.

    Processors with a fast dot product or a matrix unit for them can also look up 128 bytes at once.
    """
    fast = list_pairs()[0] != "float32"
    return dtype == "bfloat16" and fast and has("avx512vbmi") and dots() == "vnni"


def find_variant(
    spec: DecoderSpec,
    dtype: str,
    *,
    int8: bool = False,
    pairs: Pairs | None = None,
    kv_dtype: str | None = None,
) -> Variant:
    """Return how to compile for this model and this machine.

    `int8`: linear layers have 8-bit weights; activations are then float32. `pairs`: how bfloat16
    weights are multiplied; None: in the way that is fastest on this machine. `kv_dtype`: of K and
    V, a key of `EIGHT_BITS`; None: the model's.
    """
    if pairs is None:
        pairs = list_pairs()[0]
    if dtype != "bfloat16" or int8:
        pairs = "float32"
    kv = Storage(dtype, dot=pairs != "float32", amx=pairs == "amx")
    sizes = [kept_sizes(spec, layer) for layer in spec.layers if layer.attends]
    # A model without attention gets the value that many others have, and so the same kernels.
    group = math.gcd(*(own.heads // own.kv_heads for own in sizes)) if sizes else 2
    heads = next(n for n in range(min(group, _MOST_HEADS), 0, -1) if group % n == 0)
    wide = bool(sizes) and heads * 4 <= _VALUE_TILE
    wide = wide and all(own.value_dim % (4 * LANES) == 0 for own in sizes)
    return Variant(
        weights=Storage("int8") if int8 else kv,
        kv=kv,
        cache=Storage(kv_dtype) if kv_dtype else kv,
        heads=heads,
        value_vectors=4 if wide else 2,
        rows=8 if has("avx512f") else 6,
        tokens=max(1, min(_MOST_TOKENS, _MOST_ROWS // heads)),
    )
