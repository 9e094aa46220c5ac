"""Runs a decoder layer by layer: records its linears' inputs, and computes with new weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from tgi_trio.ipc.messages import SamplingParameters
from tgi_trio.ipc.startup import BLOCK_SIZE
from tgi_trio.model.matrices.decoder import layer_refs, outer_refs
from tgi_trio.model.matrices.references import LinearRef, MatrixRef
from tgi_trio.model.matrices.roles import AttentionRefs, LayerRefs, MlpRefs
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.shard.checkpoint.formats.plain import PlainMatrix
from tgi_trio.shard.checkpoint.lookup import Checkpoint
from tgi_trio.shard.checkpoint.stored_matrix import StoredMatrix
from tgi_trio.shard.contract import ShardSequence, StepPlan
from tgi_trio.shard.quantising.solver import Gram
from tgi_trio.shard.torch_backend.attention.reference import ReferenceAttention
from tgi_trio.shard.torch_backend.kv_cache import KVCache
from tgi_trio.shard.torch_backend.layers.attention.rotary import Rotary
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.layers.mlp import DenseMlp, ExpertsMlp
from tgi_trio.shard.torch_backend.models.attending import make_tables
from tgi_trio.shard.torch_backend.models.decoder import Decoder
from tgi_trio.shard.torch_backend.models.decoder_loading import DecoderLoader
from tgi_trio.shard.torch_backend.models.layer import Attention, Layer
from tgi_trio.shard.torch_backend.weights import WeightSource


class Replaced(Checkpoint):
    """A checkpoint in which some matrices have been replaced."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.numbers: dict[str, NDArray[np.float32]] = {}
        self._encoding = None
        self._plain = checkpoint

    def __contains__(self, name: str) -> bool:
        return name in self._plain

    def matrix(
        self, name: str, shape: tuple[int, int], *, transposed: bool = False
    ) -> StoredMatrix:
        if name in self.numbers:
            return PlainMatrix(self.numbers[name])
        return self._plain.matrix(name, shape, transposed=transposed)

    def vector(self, name: str, size: int) -> NDArray[np.float32]:
        return self._plain.vector(name, size)

    def number(self, names: object) -> None:
        return None  # K and V are not quantised


class Watched(Linear):
    """A linear that records its inputs."""

    __slots__ = ("_inner", "_note")

    def __init__(self, inner: Linear, note: Gram) -> None:
        super().__init__(inner.weight, inner.bias)
        self._inner, self._note = inner, note

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self._note.add(x)
        return self._inner(x)


@dataclass(frozen=True, slots=True)
class Inputs:
    """Matrices with the same inputs, and the statistics of these."""

    matrices: Sequence[MatrixRef]
    gram: Gram


class LayerWalk:
    """Calibration samples on their way through a decoder: float32 [tokens, hidden] each."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Replaced,
        samples: Sequence[NDArray[np.int64]],
        dtype: torch.dtype,
    ) -> None:
        """`samples`: token ids, all of one length. Raises ModelLoadError as the weights do."""
        self.spec = spec
        self._loader = DecoderLoader(spec, WeightSource(weights, dtype=dtype))
        self._length = len(samples[0])
        self._plan = _whole_sequence(self._length)
        outer = outer_refs(spec)
        self._embedding = self._loader.weight(outer.embedding)
        self._positions = self._loader.positions(outer)
        self._norm = self._loader.optional_norm(outer.embedding_norm)
        self._widening = self._loader.optional_linear(outer.embedding_in)
        ids = [torch.from_numpy(sample) for sample in samples]
        start = self._decoder([])
        self._hidden = [start.embed(each, self._places) for each in ids]

    def watch(self, index: int) -> list[Inputs]:
        """Run all samples through a layer with its stored weights; record its linears' inputs."""
        layer, refs = self._layer(index)
        watched = list(_watch(layer, refs))
        decoder = self._decoder([layer])
        for hidden in self._hidden:
            self._run(decoder, hidden)
        return watched

    def advance(self, index: int) -> None:
        """Run all samples through a layer; its outputs become the next layer's inputs."""
        decoder = self._decoder([self._layer(index)[0]])
        self._hidden = [self._run(decoder, hidden) for hidden in self._hidden]

    @property
    def _places(self) -> torch.Tensor:
        return torch.arange(self._length)

    def _layer(self, index: int) -> tuple[Layer, LayerRefs]:
        refs = layer_refs(self.spec, index)
        layer = self._loader.layer(index, self.spec.layers[index], refs)
        if layer.attention is not None:
            # the only layer of its decoder
            layer.attention.shape = replace(layer.attention.shape, index=0)
        return layer, refs

    def _decoder(self, layers: list[Layer]) -> Decoder:
        return Decoder(
            self.spec,
            layers=layers,
            rotaries=[Rotary(each, torch.device("cpu")) for each in self._loader.rotaries],
            embedding=self._embedding,
            positions=self._positions,
            embedding_norm=self._norm,
            final_norm=None,
            head=Linear(self._embedding),
            embedding_in=self._widening,
        )

    def _run(self, decoder: Decoder, hidden: torch.Tensor) -> torch.Tensor:
        blocks = 1 + -(-self._length // BLOCK_SIZE)
        attention = ReferenceAttention()
        cache = KVCache(decoder.kv_shape, blocks, hidden.dtype, hidden.device)
        lengths = torch.full((self._length,), self._length)
        tables = make_tables(decoder.rotaries, self._places, lengths, hidden.dtype)
        batch = attention.prepare(self._plan, cache)
        return decoder.run_layers(hidden, tables, attention, batch)


def _watch(layer: Layer, refs: LayerRefs) -> Iterator[Inputs]:
    """Wrap a layer's linears so that they record their inputs; yield the matrices of each."""
    if layer.attention is not None and refs.attention is not None:
        yield from _watch_attention(layer.attention, refs.attention)
    if isinstance(refs.mlp, MlpRefs):
        assert isinstance(layer.mlp, DenseMlp)
        yield from _watch_mlp(layer.mlp, refs.mlp)
        return
    if refs.mlp is None:
        return
    assert isinstance(layer.mlp, ExpertsMlp)
    for expert, own in zip(layer.mlp.experts, refs.mlp.experts, strict=True):
        yield from _watch_mlp(expert, own)
    if isinstance(layer.mlp.shared, DenseMlp) and refs.mlp.shared is not None:
        yield from _watch_mlp(layer.mlp.shared, refs.mlp.shared)


def _watch_attention(attention: Attention, refs: AttentionRefs) -> Iterator[Inputs]:
    yield _watch_one(attention, "qkv", refs.qkv)
    yield _watch_one(attention, "output", refs.output)
    latent = attention.latent
    if latent is not None and refs.latent is not None and refs.latent.query_up is not None:
        yield _watch_one(latent, "query_up", refs.latent.query_up)


def _watch_mlp(mlp: DenseMlp, refs: MlpRefs) -> Iterator[Inputs]:
    yield _watch_one(mlp, "up", refs.inner)
    yield _watch_one(mlp, "down", refs.down)


def _watch_one(owner: object, name: str, ref: LinearRef) -> Inputs:
    gram = Gram()
    setattr(owner, name, Watched(getattr(owner, name), gram))
    matrices: Mapping[str, MatrixRef] = {piece.matrix.name: piece.matrix for piece in ref.pieces}
    return Inputs(list(matrices.values()), gram)


def _whole_sequence(length: int) -> StepPlan:
    """Return the step that computes a whole prompt."""
    blocks = list(range(1, 1 + -(-length // BLOCK_SIZE)))
    row = ShardSequence(
        id=0,
        token_ids=np.zeros(length, np.int32),
        length=length,
        prompt_length=length,
        computed=0,
        block_ids=blocks,
        remaining=1,
        min_remaining=0,
        sampling=SamplingParameters(),
    )
    return StepPlan(
        rows=[row],
        token_ids=np.zeros(length, np.int64),
        positions=np.arange(length, dtype=np.int64),
        kv_slots=np.arange(BLOCK_SIZE, BLOCK_SIZE + length, dtype=np.int64),
        query_starts=np.array([0, length], np.int32),
        context_lengths=np.array([length], np.int32),
        block_tables=np.array([blocks], np.int32),
        samples=np.array([True]),
    )
