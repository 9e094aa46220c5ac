"""The layer of an EAGLE-3 drafter: its linear layers in the kernels, the rest in numpy.

Norms, rotary embeddings and attention of its few tokens are in numpy, over a KV cache of its own in
blocks of the same numbers as the model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.ipc.startup import BLOCK_SIZE
from tgi_trio.model.speculators.spec import EagleSpec
from tgi_trio.shard.checkpoint.numbers import to_float32
from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.cpu_backend.arena import allocate_zeroed
from tgi_trio.shard.machine.small_products import multiply_small
from tgi_trio.shard.positions.rotary_frequencies import rotary_frequencies

if TYPE_CHECKING:
    from tgi_trio.shard.cpu_backend.drafting.heads import LoadedHeads
    from tgi_trio.shard.cpu_backend.forward import Forward

Floats = NDArray[np.float32]


class KernelEagle:
    """The `EagleLayer` of `speculation/eagle.py` for the CPU kernels. States are float32."""

    def __init__(self, forward: Forward, spec: EagleSpec, heads: LoadedHeads) -> None:
        """`heads`: the weights that are not linear layers, including an embedding."""
        self.spec = spec
        self.max_positions = spec.max_positions
        self.token_map = heads.token_map
        self._forward = forward
        self._vectors = heads.vectors
        self._embedding = heads.tables["embedding"]
        layer = spec.layer
        self._shape = layer.heads, layer.kv_heads, layer.head_dim
        rotary = layer.layers[0].rotary
        self._turning = None if rotary is None else rotary_frequencies(rotary)
        self._cache: tuple[Floats, Floats] | None = None  # set by make_room

    @property
    def kv_bytes_per_token(self) -> int:
        _, kv_heads, dim = self._shape
        return 2 * kv_heads * dim * 4

    def make_room(self, blocks: int) -> int:
        """Allocate a cache of as many blocks as the model's; return its bytes."""
        self._cache = None  # freed before the new one is allocated: both may not fit
        _, kv_heads, dim = self._shape
        shape = (blocks * BLOCK_SIZE, kv_heads, dim)
        self._cache = allocate_zeroed(shape, np.float32), allocate_zeroed(shape, np.float32)
        return sum(each.nbytes for each in self._cache)

    @property
    def caches(self) -> Sequence[Floats]:
        """Its K and V, float32 [blocks * BLOCK_SIZE, kv_heads, dim] each."""
        return self._cache or ()

    def join(self, parts: Sequence[Floats]) -> Floats:
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def pick(self, states: Floats, places: NDArray[np.int64]) -> Floats:
        return states[places]

    def fuse(self, states: Floats) -> Floats:
        norms = [role for role in self._vectors if role.startswith("input norm")]
        if norms:
            parts = zip(norms, np.split(states, len(norms), axis=1), strict=True)
            states = np.concatenate([self._normalise(role, own) for role, own in parts], axis=1)
        return self._forward.multiply("fuse", states)

    def run(
        self, plan: StepPlan, states: Floats, wanted: NDArray[np.int64]
    ) -> tuple[Floats, NDArray[np.int64]]:
        embedded = self._normalise("embedding norm", self._embed(plan))
        normed = self._normalise("state norm", states)
        x = np.concatenate((embedded, normed), axis=1)
        out = self._compute(plan, x, normed if self.spec.norms_residual else states, wanted)
        if out is None:
            return states[:0], np.empty(0, np.int64)
        normed = self._normalise("final norm", out)
        best: NDArray[np.int64] = self._forward.multiply("head", normed).argmax(axis=1)
        return normed if self.spec.norms_output else out, best

    def _embed(self, plan: StepPlan) -> Floats:
        return to_float32(self._embedding[plan.token_ids])

    def _compute(
        self, plan: StepPlan, x: Floats, residual: Floats, wanted: NDArray[np.int64]
    ) -> Floats | None:
        """Compute the layer for its inputs `x` [T, inputs], and store K and V.

        Return what leaves it at the places `wanted`: `residual` [T, features] and the outputs of
        attention and MLP; None if no place is wanted.
        """
        queries = self._keep(plan, self._forward.multiply("qkv", x))
        if not len(wanted):
            return None
        attended = self._attend(plan, queries, wanted)
        y = residual[wanted] + self._forward.multiply("output", attended)
        inner = self._forward.multiply("inner", self._normalise("mlp norm", y))
        gate, up = np.split(inner, 2, axis=1)
        half = np.float32(0.5)
        gate = gate * (half + half * np.tanh(half * gate))  # SiLU
        return y + self._forward.multiply("down", gate * up)

    def _keep(self, plan: StepPlan, qkv: Floats) -> Floats:
        """Write K and V to the cache; return rotated queries [T, heads, dim]."""
        if self._cache is None:
            raise RuntimeError("the drafter has no KV cache before the warm-up")
        heads, kv_heads, dim = self._shape
        split = qkv.reshape(len(qkv), -1, dim)
        turned = split[:, : heads + kv_heads]
        if self._turning is not None:
            turned = turn_heads(turned, plan.positions, *self._turning)
        keys, values = self._cache
        keys[plan.kv_slots] = turned[:, heads:]
        values[plan.kv_slots] = split[:, heads + kv_heads :]
        return turned[:, :heads]

    def _attend(self, plan: StepPlan, queries: Floats, wanted: NDArray[np.int64]) -> Floats:
        """Return the attention output of the queries at `wanted`: [n, heads * dim]."""
        if self._cache is None:
            raise RuntimeError("the drafter has no KV cache before the warm-up")
        heads, kv_heads, dim = self._shape
        window = self.spec.layer.layers[0].window
        found = np.empty((len(wanted), heads * dim), np.float32)
        rows = np.searchsorted(plan.query_starts, wanted, side="right") - 1
        for i, (place, row) in enumerate(zip(wanted.tolist(), rows.tolist(), strict=True)):
            count = int(plan.positions[place]) + 1
            first = max(0, count - window) if window else 0
            own = plan.block_tables[row, : -(-count // BLOCK_SIZE)].astype(np.int64)
            slots = (own[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).reshape(-1)[first:count]
            keys, values = (each[slots].transpose(1, 0, 2) for each in self._cache)
            query = queries[place].reshape(kv_heads, heads // kv_heads, dim)
            scale = np.float32(self.spec.layer.layers[0].scale)
            scores = multiply_small(query, keys.transpose(0, 2, 1)) * scale
            weights = np.exp(scores - scores.max(axis=2, keepdims=True))
            weights /= weights.sum(axis=2, keepdims=True)
            found[i] = multiply_small(weights, values).reshape(-1)
        return found

    def _normalise(self, role: str, x: Floats) -> Floats:
        squares: Any = np.add.reduce(x * x, axis=1, keepdims=True) * np.float32(1 / x.shape[1])
        found: Floats = x / np.sqrt(squares + np.float32(self.spec.layer.norm_eps))
        return found * self._vectors[role]


def turn_heads(
    x: Floats, positions: NDArray[np.int64], frequencies: Floats, scale: float
) -> Floats:
    """Rotate [T, heads, dim], with pairs half of the rotated dimensions apart.

    `frequencies`, `scale`: as `rotary_frequencies` returns them.
    """
    count = len(frequencies)
    angles = positions[:, None, None].astype(np.float32) * frequencies
    cosines, sines = np.cos(angles) * np.float32(scale), np.sin(angles) * np.float32(scale)
    first, second = x[..., :count], x[..., count : 2 * count]
    turned = (first * cosines - second * sines, second * cosines + first * sines)
    return np.concatenate((*turned, x[..., 2 * count :]), axis=-1)
