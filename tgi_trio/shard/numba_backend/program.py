"""From a model's spec and checkpoint to the table of operations that the kernels run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.cpu.fitting import ACTIVATIONS
from tgi_trio.shard.cpu.memory import address, zeroed
from tgi_trio.shard.cpu.packing import Packer, Source, interleave, stored, to_bfloat16, to_float32
from tgi_trio.shard.cpu.storage import PANEL, Storage
from tgi_trio.shard.cpu.tables import OPERATION, Buffer, Code, Epilogue
from tgi_trio.shard.layers.frequencies import rotary_frequencies
from tgi_trio.shard.models.specs import DecoderSpec, LayerSpec, RotarySpec
from tgi_trio.shard.step import BLOCK_SIZE

Array = NDArray[Any]


class Tensors(Source, Protocol):
    """Where weights come from: a checkpoint, or made-up ones for the self-test."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> Array: ...

    def vector(self, name: str, size: int) -> NDArray[np.float32]: ...


@contextlib.contextmanager
def packing(
    spec: DecoderSpec, tensors: Tensors, dtype: str, *, int8: bool = False, threads: int = 1
) -> Iterator[Program]:
    """Yield a model's program while `threads` pack its weights; leaving waits for them.

    `int8`: linear layers get 8-bit weights. Raises ModelLoadError as the tensors and the packer do.
    """
    with Packer(tensors, Storage("int8" if int8 else dtype), threads) as packer:
        program = Program(spec, tensors, packer, bf16=dtype == "bfloat16")
        packer.start()
        yield program


class Program:
    """The operations of one model. Holds its packed weights and its KV cache, which they point to.

    `operations[:body]` compute hidden states, the rest the logits of the wanted tokens.
    """

    def __init__(self, spec: DecoderSpec, tensors: Tensors, packer: Packer, *, bf16: bool) -> None:
        """Hand every weight to `packer`; raises ModelLoadError as the tensors do.

        `bf16`: the model's dtype is bfloat16, otherwise float32.
        """
        self.spec = spec
        self.weight_bytes = 0
        self._tensors = tensors
        self._packer = packer
        self._bf16 = bf16
        self._kept: list[Array] = []  # operations hold addresses only
        self._rows: list[NDArray[np.void]] = []
        self._build()
        self.operations = np.stack(self._rows)
        self.body = len(self._rows) - 2  # the final norm and the head come after it
        self.kv_cache: tuple[Array, Array] | None = None

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers."""
        spec = self.spec
        return 2 * len(spec.layers) * spec.kv_heads * spec.head_dim * (2 if self._bf16 else 4)

    def allocate_kv(self, blocks: int) -> int:
        """Make a new, empty KV cache; return its bytes."""
        spec, kind = self.spec, np.uint16 if self._bf16 else np.float32
        self.kv_cache = None  # before the new one: both may not fit
        shape = (len(spec.layers), blocks, spec.kv_heads, BLOCK_SIZE * spec.head_dim)
        keys, values = zeroed(shape, kind), zeroed(shape, kind)
        self.kv_cache = keys, values
        of_layers = np.isin(self.operations["code"], (Code.ROTATE, Code.ATTEND))
        for column, cache in (("keys", keys), ("values", values)):
            first, step = address(cache), cache.strides[0]
            layers = np.repeat(np.arange(len(spec.layers)), 2)
            self.operations[column][of_layers] = first + layers * step
        return keys.nbytes + values.nbytes

    def set_positions(self, count: int) -> None:
        """Make the rotary tables for positions below `count`."""
        tables: dict[RotarySpec, tuple[Array, Array]] = {}
        turning = np.flatnonzero(self.operations["code"] == Code.ROTATE)
        for place, layer in zip(turning, self.spec.layers, strict=True):
            if layer.rotary is None:
                continue
            if layer.rotary not in tables:
                tables[layer.rotary] = _cosines_and_sines(layer.rotary, count)
            cosines, sines = tables[layer.rotary]
            self.operations[place]["cosines"] = address(cosines)
            self.operations[place]["sines"] = address(sines)
            self.operations[place]["rotated"] = layer.rotary.dim
        self._tables = tables

    def buffer_bytes(self, tokens: int, wanted: int) -> dict[Buffer, int]:
        """Return the size of every buffer for so many tokens and rows of logits."""
        spec = self.spec
        queries = spec.heads * spec.head_dim
        return {
            Buffer.HIDDEN: tokens * spec.hidden_size * 4,
            Buffer.NORMED: max(tokens, wanted) * spec.hidden_size * 4,
            Buffer.QKV: tokens * (queries + 2 * spec.kv_heads * spec.head_dim) * 4,
            Buffer.QUERY: tokens * queries * 4,
            Buffer.ATTENDED: tokens * queries * 4,
            Buffer.INNER: tokens * spec.mlp_width * 4,
            Buffer.BRANCH: tokens * spec.hidden_size * 4,
            Buffer.LOGITS: wanted * self.padded_vocab * 4,
        }

    @property
    def padded_vocab(self) -> int:
        """Width of a row of logits: the vocabulary in whole panels."""
        return -(-self.spec.vocab_size // PANEL) * PANEL

    # --- building -----------------------------------------------------------------------------

    def _build(self) -> None:
        spec, names = self.spec, self.spec.names
        shape = (spec.vocab_size, spec.hidden_size)
        embedding = self._tensors.tensor(f"{names.embedding}.weight", shape)
        scale = np.array([spec.embedding_scale], np.float32)
        if self._bf16:  # rounded to the dtype first, as Gemma was trained
            scale = to_float32(to_bfloat16(scale))
        self._add(
            Code.EMBED,
            target=Buffer.HIDDEN,
            weights=self._keep(stored(embedding, self._bf16)),
            width=spec.hidden_size,
            scale=scale[0],
        )
        for index, layer in enumerate(spec.layers):
            self._layer(names.layer.format(index), layer)
        head = embedding
        if not spec.tied_head:
            head = self._tensors.tensor(f"{names.head}.weight", shape)
        bias = self._bias([f"{names.head}.bias"], [spec.vocab_size]) if spec.head_bias else None
        self._norm(names.final_norm, Buffer.HIDDEN, wanted_only=1)
        self._linear(
            Buffer.NORMED,
            Buffer.LOGITS,
            [head],
            bias,
            scale=spec.logit_scale,
            cap=spec.final_soft_cap,
            wanted_only=1,
        )

    def _layer(self, prefix: str, layer: LayerSpec) -> None:
        spec, names = self.spec, self.spec.names
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self._norm(prefix + names.attention_norm, Buffer.HIDDEN)
        weights, bias = self._qkv(prefix, queries, keys)
        self._linear(Buffer.NORMED, Buffer.QKV, weights, bias)
        self._rotate(prefix, layer)
        self._add(Code.ATTEND, window=layer.window, cap=spec.attention_soft_cap)
        weights = self._matrices([prefix + names.output], [spec.hidden_size], queries)
        bias = self._bias([prefix + names.output + ".bias"], [spec.hidden_size], spec.output_bias)
        self._branch(Buffer.ATTENDED, weights, bias, prefix, names.attention_post_norm)
        self._norm(prefix + names.mlp_norm, Buffer.HIDDEN)
        self._mlp(prefix)

    def _qkv(self, prefix: str, queries: int, keys: int) -> tuple[list[Array], Array | None]:
        spec, names = self.spec, self.spec.names
        rows, parts = [queries + 2 * keys], [prefix + names.qkv]
        if spec.qkv_layout == "separate":
            rows = [queries, keys, keys]
            parts = [prefix + part for part in (names.query, names.key, names.value)]
        bias = self._bias([part + ".bias" for part in parts], rows, spec.qkv_bias)
        return self._matrices(parts, rows, spec.hidden_size), bias

    def _rotate(self, prefix: str, layer: LayerSpec) -> None:
        spec, names = self.spec, self.spec.names
        norms = {}
        if spec.query_key_norm == "head":
            norms = {
                "query_norm": self._norm_weight(prefix + names.query_norm, spec.head_dim),
                "key_norm": self._norm_weight(prefix + names.key_norm, spec.head_dim),
            }
        self._add(Code.ROTATE, scale=layer.scale, eps=spec.norm_eps, **norms)

    def _mlp(self, prefix: str) -> None:
        spec, names, width = self.spec, self.spec.names, self.spec.mlp_width
        parts, rows = [prefix + names.up], [width]
        if names.gate_up:
            parts, rows = [prefix + names.gate_up], [2 * width]
        elif spec.gated:
            parts, rows = [prefix + names.gate, prefix + names.up], [width, width]
        weights = self._matrices(parts, rows, spec.hidden_size)
        bias = self._bias([part + ".bias" for part in parts], rows, spec.mlp_bias)
        if len(weights) == 1 and spec.gated:
            weights = [weights[0][:width], weights[0][width:]]
        if spec.gated and bias is not None:
            bias = interleave(bias[:width], bias[width:])
        self._linear(
            Buffer.NORMED,
            Buffer.INNER,
            weights,
            bias,
            paired=spec.gated,
            width=width,
            epilogue=Epilogue.GATE if spec.gated else Epilogue.ACTIVATE,
            activation=ACTIVATIONS[spec.activation],
        )
        weights = self._matrices([prefix + names.down], [spec.hidden_size], width)
        bias = self._bias([prefix + names.down + ".bias"], [spec.hidden_size], spec.mlp_bias)
        self._branch(Buffer.INNER, weights, bias, prefix, names.mlp_post_norm)

    def _branch(
        self,
        source: Buffer,
        weights: list[Array],
        bias: Array | None,
        prefix: str,
        post_norm: str,
    ) -> None:
        """End a branch: it joins the residual stream, through a norm of its own if it has one."""
        add: dict[str, Any] = {"epilogue": Epilogue.ADD, "scale": self.spec.residual_scale}
        if not post_norm:
            self._linear(source, Buffer.HIDDEN, weights, bias, **add)
            return
        self._linear(source, Buffer.BRANCH, weights, bias)
        self._norm(prefix + post_norm, Buffer.BRANCH, target=Buffer.HIDDEN, **add)

    def _norm(self, name: str, source: Buffer, **fields: Any) -> None:
        spec, bias = self.spec, None
        if spec.norm_bias:
            bias = self._tensors.vector(f"{name}.bias", spec.hidden_size)
        defaults = {"target": Buffer.NORMED, "epilogue": Epilogue.PASS, "scale": 1.0}
        self._add(
            Code.NORM,
            source=source,
            inputs=spec.hidden_size,
            weights=self._norm_weight(name, spec.hidden_size),
            bias=self._keep(bias),
            centred=spec.norm == "layer",
            eps=spec.norm_eps,
            **(defaults | fields),
        )

    def _norm_weight(self, name: str, size: int) -> int:
        if not self.spec.norm_weight:
            return 0
        weight = self._tensors.vector(f"{name}.weight", size)
        if self.spec.norm == "rms_plus_one":
            weight = weight + np.float32(1.0)
        return self._keep(weight)

    def _linear(
        self,
        source: Buffer,
        target: Buffer,
        weights: list[Array],
        bias: Array | None,
        paired: bool = False,
        **fields: Any,
    ) -> None:
        panels, scales = self._packer.pack(weights, paired=paired)
        outputs = len(panels) * PANEL
        if bias is not None:
            bias = np.pad(bias, (0, outputs - len(bias)))
        defaults = {"epilogue": Epilogue.STORE, "scale": 1.0, "width": outputs}
        self._add(
            Code.LINEAR,
            source=source,
            target=target,
            weights=self._keep(panels),
            scales=self._keep(scales),
            bias=self._keep(bias),
            inputs=weights[0].shape[1],
            outputs=outputs,
            **(defaults | fields),
        )

    def _matrices(self, names: list[str], rows: list[int], columns: int) -> list[Array]:
        """Return matrices [rows, columns] as the checkpoint has them."""
        return [
            self._tensors.tensor(f"{name}.weight", (count, columns))
            for name, count in zip(names, rows, strict=True)
        ]

    def _bias(self, names: list[str], sizes: list[int], wanted: bool = True) -> Array | None:
        if not wanted:
            return None
        pairs = zip(names, sizes, strict=True)
        return np.concatenate([self._tensors.vector(name, size) for name, size in pairs])

    def _keep(self, array: Array | None) -> int:
        """Keep an array alive; return its address, 0 for none."""
        if array is None:
            return 0
        array = np.ascontiguousarray(array)
        self._kept.append(array)
        self.weight_bytes += array.nbytes
        return address(array)

    def _add(self, code: Code, **fields: Any) -> None:
        row = np.zeros((), OPERATION)
        row["code"] = code
        for name, value in fields.items():
            row[name] = value
        self._rows.append(row)


def _cosines_and_sines(spec: RotarySpec, count: int) -> tuple[Array, Array]:
    """Return float32 [count, dim / 2] each."""
    frequencies, scale = rotary_frequencies(spec)
    angles = np.arange(count, dtype=np.float32)[:, None] * frequencies
    return np.cos(angles) * np.float32(scale), np.sin(angles) * np.float32(scale)
