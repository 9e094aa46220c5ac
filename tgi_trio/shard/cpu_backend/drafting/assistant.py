"""An assistant of Gemma 4: its linear layers in the kernels, the rest in numpy.

Norms, rotations and attention of its few tokens are in numpy, over the model's KV cache, which is
read once for all drafts of a step, since all are made from one position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tgi_trio.ipc.startup import BLOCK_SIZE
from tgi_trio.model.matrices.decoder import layer_refs, outer_refs
from tgi_trio.model.matrices.references import LinearRef, NormRef
from tgi_trio.model.matrices.roles import LayerRefs, MlpRefs
from tgi_trio.model.specs.decoder import LayerSpec
from tgi_trio.model.speculators.assistant import AssistantSpec
from tgi_trio.shard.checkpoint.numbers import to_bfloat16, to_float32
from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.cpu_backend.drafting.eagle import Floats, turn_heads
from tgi_trio.shard.cpu_backend.drafting.heads import KernelArithmetic
from tgi_trio.shard.machine.small_products import multiply_small
from tgi_trio.shard.positions.rotary_frequencies import rotary_frequencies
from tgi_trio.shard.speculation.arithmetic import MODEL_HEAD

if TYPE_CHECKING:
    from tgi_trio.shard.cpu_backend.drafting.heads import LoadedHeads
    from tgi_trio.shard.cpu_backend.forward import Forward

Read = dict[tuple[int, int], list["_Context"]]  # by layer of the model and window, of each row


class _Context(NamedTuple):
    """What a row's queries attend to, in one layer of the model."""

    keys: Floats  # [kv_heads, dim, tokens]
    values: Floats  # [kv_heads, tokens, dim]


class KernelAssistant:
    """The `Assistant` of `speculation/assistant.py` for the CPU kernels. States are float32."""

    def __init__(self, forward: Forward, spec: AssistantSpec, heads: LoadedHeads) -> None:
        """`heads`: the weights that are not linear layers, including the model's embedding."""
        base = forward.spec
        self._spec = spec
        self._forward = forward
        self._model = KernelArithmetic(forward, forward.program, heads)
        self._vectors = heads.vectors
        self._tables = heads.tables
        self._decoder = spec.reading(base)
        self._layers = [
            (layer, layer_refs(self._decoder, i)) for i, layer in enumerate(self._decoder.layers)
        ]
        self._final_norm = outer_refs(self._decoder).final_norm
        self._order = None
        if heads.token_map is not None:
            self._order = heads.token_map.reshape(spec.clusters, -1)
        scale = np.array([base.embedding_scale], np.float32)
        # Rounded to the dtype first, as in Gemma's training.
        self._scale = to_float32(to_bfloat16(scale)) if forward.variant.kv.bf16 else scale
        keeps = [layer.attends and layer.reads_layer is None for layer in base.layers]
        self._kept = np.cumsum(keeps) - 1  # place of each layer's K and V among those there are

    def draft(self, plan: StepPlan, states: Floats, count: int) -> NDArray[np.int64]:
        read: Read = {}
        for layer, _ in self._layers:
            if (found := _source(layer)) not in read:
                read[found] = [self._read(plan, row, *found) for row in range(len(plan.rows))]
        state, ids = self._model.normalise(states), plan.token_ids
        drafts = []
        for _ in range(count):
            embedded = to_float32(self._tables["embedding"][ids]) * self._scale
            x = self._forward.multiply("entry", np.concatenate((embedded, state), axis=1))
            for layer, refs in self._layers:
                x = self._compute(layer, refs, x, plan.positions + 1, read[_source(layer)])
            x = self._normalise(self._final_norm, x)
            state, ids = self._forward.multiply("exit", x), self._best(x)
            drafts.append(ids)
        return np.stack(drafts, axis=1)

    def _read(self, plan: StepPlan, row: int, source: int, window: int) -> _Context:
        """Return the K and V of a row's known tokens, those in the window if there is one."""
        count = int(plan.positions[row]) + 1
        first = max(0, count - window) if window else 0
        block = first // BLOCK_SIZE
        table = plan.block_tables[row, block : -(-count // BLOCK_SIZE)]
        keys, values = (
            cache[table] for cache in self._forward.program.kv_cache[self._kept[source]]
        )
        blocks, heads, _ = keys.shape
        step = 4 // keys.itemsize  # neighbouring numbers of a key
        # A block of K is [dim / step, tokens, step], one of V [tokens, dim].
        split = keys.reshape(blocks, heads, -1, BLOCK_SIZE, step).transpose(1, 2, 4, 0, 3)
        own = slice(first - block * BLOCK_SIZE, count - block * BLOCK_SIZE)
        turned = to_float32(split).reshape(heads, -1, blocks * BLOCK_SIZE)
        rows = to_float32(values.reshape(blocks, heads, BLOCK_SIZE, -1).swapaxes(0, 1))
        return _Context(turned[:, :, own], rows.reshape(heads, blocks * BLOCK_SIZE, -1)[:, own])

    def _compute(
        self,
        layer: LayerSpec,
        refs: LayerRefs,
        x: Floats,
        positions: NDArray[np.int64],
        contexts: list[_Context],
    ) -> Floats:
        """Return what leaves a layer, for its input `x` [n, features]."""
        mlp = refs.mlp
        if refs.attention is None or not isinstance(mlp, MlpRefs):
            raise ValueError("an assistant's layer has attention and a dense MLP")
        normed = self._normalise(refs.attention_norm, x)
        heads = self._decoder.heads
        query = self._multiply(refs.attention.qkv, normed).reshape(len(x), heads, -1)
        query = self._normalise(refs.attention.query_norm, query)
        if layer.rotary is not None:
            query = turn_heads(query, positions, *rotary_frequencies(layer.rotary))
        attended = np.stack(
            [_attend(own, held, layer.scale) for own, held in zip(query, contexts, strict=True)]
        )
        attended = self._multiply(refs.attention.output, attended)
        x = x + self._normalise(refs.attention_post_norm, attended)
        gate, up = self._multiply_each(mlp.inner, self._normalise(refs.mlp_norm, x))
        inner = self._multiply(mlp.down, _gelu(gate) * up)
        x = x + self._normalise(refs.mlp_post_norm, inner)
        return x if refs.scale is None else x * self._vectors[refs.scale.name]

    def _best(self, x: Floats) -> NDArray[np.int64]:
        """Return the best token of each row, in the best clusters if there are any."""
        if self._order is None:
            found: NDArray[np.int64] = self._forward.multiply(MODEL_HEAD, x).argmax(axis=1)
            return found
        scores, used = self._forward.multiply("clusters", x), self._spec.clusters_used
        tokens = self._order[np.argpartition(-scores, used - 1, axis=1)[:, :used]]
        tokens = tokens.reshape(len(x), -1)
        rows = to_float32(self._tables["head"][tokens])
        best = np.einsum("ntf,nf->nt", rows, x).argmax(axis=1)  # no threads, as in small_products
        return np.take_along_axis(tokens, best[:, None], axis=1)[:, 0]

    def _multiply(self, ref: LinearRef, x: Floats) -> Floats:
        (product,) = self._multiply_each(ref, x)
        return product

    def _multiply_each(self, ref: LinearRef, x: Floats) -> list[Floats]:
        """Return the products of x with the matrices of a linear, whose names are their roles."""
        return [self._forward.multiply(piece.matrix.name, x) for piece in ref.pieces]

    def _normalise(self, norm: NormRef | None, x: Floats) -> Floats:
        if norm is None:
            return x
        squares: Any = np.square(x).mean(axis=-1, keepdims=True)
        found: Floats = x / np.sqrt(squares + np.float32(norm.eps))
        return found * self._vectors[norm.weight]


def _source(layer: LayerSpec) -> tuple[int, int]:
    """Return the layer of the model that a layer reads, and its window."""
    if layer.reads_layer is None:
        raise ValueError("an assistant's layer has no K and V")
    return layer.reads_layer, layer.window


def _attend(query: Floats, context: _Context, scale: float) -> Floats:
    """Return attention's output [heads * dim] for a token's queries [heads, dim]."""
    grouped = query.reshape(len(context.keys), -1, query.shape[-1])
    scores = multiply_small(grouped, context.keys) * np.float32(scale)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    return multiply_small(weights, context.values).reshape(-1)


def _gelu(x: Floats) -> Floats:
    """Return GELU, approximated with tanh as in Gemma."""
    inner = np.float32(0.7978845608) * (x + np.float32(0.044715) * x * x * x)
    found: Floats = np.float32(0.5) * x * (1 + np.tanh(inner))
    return found
