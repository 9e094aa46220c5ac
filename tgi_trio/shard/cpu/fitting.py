"""Which models and machines the kernels fit, and how they are compiled for them."""

from __future__ import annotations

import llvmlite.binding as llvm
from numba import config

from tgi_trio.shard.cpu.kernels.variant import LANES, PANEL, Storage, Variant
from tgi_trio.shard.cpu.tables import Activation
from tgi_trio.shard.models.specs import DecoderSpec

ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
}
_ROTARY_KINDS = ("default", "linear", "llama3", "yarn")  # the same frequencies at every length
_DTYPES = ("float32", "bfloat16")
# Processors whose bfloat16 dot product is faster than two float32 multiply-adds. Intel's takes
# longer (measured on an Emerald Rapids: 74 against 107 GFLOP/s), and rounds the activations.
_FAST_DOT = ("znver",)
_MOST_HEADS = 8  # that attend together: two blocks of scores for each fill half of the registers
_VALUE_TILE = 16  # vectors of a tile of values


def misfit(spec: DecoderSpec | None, dtype: str) -> str | None:
    """Return why the kernels cannot run a model, or None when they can."""
    if spec is None:
        return "the model runs through transformers"
    rotaries = [layer.rotary for layer in spec.layers if layer.rotary is not None]
    reasons = {
        "keys and values are compressed": spec.latent,
        f"dtype {dtype} is not one of {', '.join(_DTYPES)}": dtype not in _DTYPES,
        f"head size {spec.head_dim} is no multiple of {PANEL}": spec.head_dim % PANEL,
        f"hidden size {spec.hidden_size} is no multiple of {PANEL}": spec.hidden_size % PANEL,
        f"MLP width {spec.mlp_width} is no multiple of {PANEL}": spec.mlp_width % PANEL,
        f"activation {spec.activation!r} is not built": spec.activation not in ACTIVATIONS,
        "attention and MLP run in parallel": spec.parallel,
        "it is a mixture of experts": any(layer.experts for layer in spec.layers),
        "positions are learned": spec.position_rows,
        "attention has linear biases": spec.alibi,
        "the head is normalised": spec.normalised_head,
        "embeddings are normed": spec.names.embedding_norm,
        "queries and keys are normed over all heads": spec.query_key_norm == "whole",
        "query and key norms have a mean": spec.query_key_norm == "head" and spec.norm == "layer",
        "queries, keys and values are clamped": spec.qkv_clip,
        "weights are stored transposed": spec.transposed,
        "query, key and value rows are grouped": spec.qkv_layout == "grouped",
        "a layer lacks a norm": not (spec.names.attention_norm and spec.names.mlp_norm),
        "rotary pairs are neighbours": any(r.interleaved for r in rotaries),
        "rotary frequencies depend on the length": any(
            r.kind not in _ROTARY_KINDS for r in rotaries
        ),
        "part of a head that turns is no multiple of 32": any(
            r.dim % (2 * LANES) for r in rotaries
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


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
