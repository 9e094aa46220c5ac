"""Self-test of the kernels: a tiny model, compared with numpy at every start.

If the compiler miscompiled for this machine, requests would be answered with plausible nonsense.
The test also compiles the kernels before the team of threads exists.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.ipc.startup import BLOCK_SIZE
from tgi_trio.model.families.names import LLAMA
from tgi_trio.model.specs.decoder import DecoderSpec, LayerSpec, RotarySpec
from tgi_trio.shard.checkpoint.formats.int8 import to_int8
from tgi_trio.shard.checkpoint.formats.plain import PlainMatrix
from tgi_trio.shard.checkpoint.numbers import Floats, to_bfloat16, to_float32
from tgi_trio.shard.cpu_backend.forward import Forward, Tokens
from tgi_trio.shard.cpu_backend.program import pack_program
from tgi_trio.shard.cpu_backend.tables import MIXING
from tgi_trio.shard.cpu_backend.variant import Variant
from tgi_trio.shard.cpu_backend.weight_layout import EIGHT_BITS, CacheNumbers

_TOLERANCES = {True: 0.05, False: 1e-4}  # of the logits' norm, with rounded numbers or without
_KV_SCALES = (0.25, 2.0)
_LENGTHS = (21, 3)  # tokens of two sequences: over several blocks, and within one
_THETA = 10000.0


# The address of the kernels of mixtures, a function that makes a model with one, and a reference.
Mixture = tuple[
    int,
    Callable[[DecoderSpec], DecoderSpec],
    Callable[[DecoderSpec, "RandomWeights", Floats], Any],
]


def find_fault(dtype: str, variant: Variant, *, mixture: Mixture | None = None) -> str | None:
    """Return what is wrong with the kernels of a variant, or None; `dtype`: the model's.

    `mixture`: replaces the MLP. Raises what the compiler raises if it has no instructions for them.
    """
    int8, name = variant.weights.int8, variant.cache.numbers
    tiny, tensors = _tiny(variant), RandomWeights(int8)
    kv = CacheNumbers(name, [_KV_SCALES]) if variant.cache.eight else None
    mlp: Any = _mlp
    if mixture is not None:
        tiny, mlp = mixture[1](tiny), mixture[2]
    expected = expected_logits(tiny, tensors, kv, mlp)
    with pack_program(tiny, tensors, dtype, int8=int8, kv=kv) as program:
        program.allocate_kv(8)
    if mixture is not None:
        program.link_kernel_group(MIXING, mixture[0])
    with Forward(program, variant, [0]) as forward:
        found = np.concatenate([_run(forward, 0, 17), _run(forward, 17, 4)])
    # In the order in which they were computed: 17 + 2 tokens, then 4 + 1.
    expected = expected[[*range(17), 21, 22, *range(17, 21), 23]]
    compared = np.isfinite(expected).all(axis=1)
    apart = np.linalg.norm((found - expected)[compared])
    error = float(apart / np.linalg.norm(expected[compared]))
    # A value halfway between two 8-bit numbers may be rounded to either.
    limit = _TOLERANCES[dtype == "bfloat16" or kv is not None]
    if error < limit:  # and False for NaN
        return None
    return f"its logits are {error:.2g} of their norm away from the reference, allowed {limit:g}"


def expected_logits(
    spec: DecoderSpec, weights: RandomWeights, kv: CacheNumbers | None, mlp: Any
) -> Floats:
    """Return float32 [T, vocabulary] of both sequences, the model in plain numpy.

    Tokens for which `mlp` returns NaN have NaN.
    """
    return np.concatenate([_logits(spec, weights, _ids(n), kv, mlp) for n in _LENGTHS])


def _tiny(variant: Variant) -> DecoderSpec:
    """Return a model of one layer that fits a variant."""
    head_dim = 16 * variant.value_vectors
    rotary = RotarySpec(dim=head_dim, theta=_THETA)
    return DecoderSpec(
        family="self-test",
        vocab_size=64,
        hidden_size=64,
        heads=2 * variant.heads,
        kv_heads=2,
        head_dim=head_dim,
        mlp_width=64,
        layers=(LayerSpec(scale=head_dim**-0.5, rotary=rotary),),
        names=LLAMA,
        tied_head=True,
    )


class RandomWeights:
    """Weights that are the same at every start, exact in bfloat16 or in int8 with scales."""

    encoding = None

    def __init__(self, int8: bool) -> None:
        self._int8 = int8

    def tensor(self, name: str, shape: tuple[int, ...]) -> Floats:
        """Return the numbers of a matrix or vector."""
        draw = np.random.default_rng(sum(name.encode()))
        values = draw.standard_normal(shape, np.float32) / math.sqrt(shape[-1])
        if self._int8 and len(shape) == 2:
            whole, scales = to_int8(values)
            return whole * scales[:, None]
        return to_float32(to_bfloat16(values))

    def matrix(self, name: str, shape: tuple[int, int], *, transposed: bool = False) -> PlainMatrix:
        return PlainMatrix(self.tensor(name, shape))

    def vector(self, name: str, size: int) -> Floats:
        return 1.0 + self.tensor(name, (size,))

    def array(self, name: str, shape: tuple[int, ...]) -> Floats:
        return self.tensor(name, shape)


def _ids(count: int) -> NDArray[np.int32]:
    return (np.arange(count, dtype=np.int32) * 7 + count) % 64


def _run(forward: Forward, begin: int, count: int) -> Floats:
    """Run `count` tokens of the first sequence from `begin` on, and some of the second."""
    tables = np.array([[5, 2], [3, 0]], np.int32)
    other = np.arange(2, dtype=np.int32) if begin == 0 else np.array([2], np.int32)
    positions = np.concatenate([np.arange(begin, begin + count, dtype=np.int32), other])
    rows = np.repeat(np.arange(2, dtype=np.int32), [count, len(other)])
    ids = np.concatenate([_ids(_LENGTHS[0])[begin : begin + count], _ids(_LENGTHS[1])[other]])
    slots = tables[rows, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    tokens = Tokens(ids, positions, slots.astype(np.int32), rows, tables, begin + count)
    return forward.run(tokens, np.arange(len(ids), dtype=np.int32)).copy()


def _logits(
    spec: DecoderSpec,
    weights: RandomWeights,
    ids: NDArray[np.int32],
    kv: CacheNumbers | None,
    mlp: Any,
) -> Floats:
    """Return float32 [T, vocabulary]: the model in plain numpy."""
    names, prefix, hidden = spec.names, spec.names.layer.format(0), spec.hidden_size

    def linear(x: Floats, name: str, outputs: int) -> Any:
        return x @ weights.tensor(f"{prefix}{name}.weight", (outputs, x.shape[1])).T

    def norm(x: Floats, name: str) -> Any:
        scaled = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + spec.norm_eps)
        return scaled * weights.vector(f"{name}.weight", hidden)

    embedding = weights.tensor(f"{names.embedding}.weight", (spec.vocab_size, hidden))
    x = embedding[ids]
    attended = _attend(spec, linear, norm(x, prefix + names.attention_norm), kv)
    x = x + linear(attended, names.output, hidden)
    inner = norm(x, prefix + names.mlp_norm)
    x = x + mlp(spec, weights, inner)
    return np.asarray(norm(x, names.final_norm) @ embedding.T)


def _mlp(spec: DecoderSpec, weights: RandomWeights, x: Floats) -> Any:
    names, prefix = spec.names, spec.names.layer.format(0)

    def linear(x: Floats, name: str, outputs: int) -> Any:
        return x @ weights.tensor(f"{prefix}{name}.weight", (outputs, x.shape[1])).T

    gate = linear(x, names.gate, spec.mlp_width)
    gated = gate / (1.0 + np.exp(-gate)) * linear(x, names.up, spec.mlp_width)
    return linear(gated, names.down, spec.hidden_size)


def _attend(spec: DecoderSpec, linear: Any, x: Floats, kv: CacheNumbers | None) -> Any:
    names, count, size = spec.names, len(x), spec.head_dim

    def heads(name: str, number: int, turned: bool) -> Any:
        parts = linear(x, name, number * size).reshape(count, number, size)
        if not turned:
            return parts
        angles = np.arange(count)[:, None] / _THETA ** (np.arange(0, size, 2) / size)
        cosine, sine = np.cos(angles)[:, None], np.sin(angles)[:, None]
        a, b = np.split(parts, 2, axis=2)
        return np.concatenate([a * cosine - b * sine, a * sine + b * cosine], axis=2)

    group = spec.heads // spec.kv_heads
    query = heads(names.query, spec.heads, True)
    key, value = heads(names.key, spec.kv_heads, True), heads(names.value, spec.kv_heads, False)
    if kv is not None:
        key, value = (
            _rounded(x, kv.name, s) for x, s in zip((key, value), kv.scales[0], strict=True)
        )
    key, value = (each.repeat(group, axis=1) for each in (key, value))
    scores = np.einsum("qhd,khd->hqk", query, key) * spec.layers[0].scale
    scores += np.triu(np.full((count, count), -np.inf), 1)
    odds = np.exp(scores - scores.max(axis=2, keepdims=True))
    odds /= odds.sum(axis=2, keepdims=True)
    return np.einsum("hqk,khd->qhd", odds, value).reshape(count, -1).astype(np.float32)


def _rounded(values: Floats, name: str, scale: float) -> Any:
    """Return values as read from an 8-bit cache."""
    kind = EIGHT_BITS[name]
    size = np.abs(values) / scale
    exponent = np.floor(np.log2(np.maximum(size, 2.0 ** (1 - kind.bias))))
    step = np.exp2(exponent - kind.fraction)
    return np.copysign(np.minimum(np.rint(size / step) * step, kind.largest), values) * scale
