"""Which models the kernels fit. No numba in this file."""

from __future__ import annotations

from tgi_trio.shard.cpu.storage import LANES, PANEL
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


class UnfitError(Exception):
    """The kernels cannot run this model, or not on this machine."""


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
