"""Loads an assistant of Gemma 4 in torch, beside the model whose keys and values it reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from tgi_trio.model.config import ModelConfig
from tgi_trio.model.matrices.decoder import outer_refs
from tgi_trio.model.matrices.references import every_unit
from tgi_trio.model.matrices.roles import AttentionRefs
from tgi_trio.model.specs.decoder import DecoderSpec, LayerSpec
from tgi_trio.model.speculators.assistant import AssistantSpec
from tgi_trio.model.speculators.recognise import find_kind, read_heads
from tgi_trio.shard.checkpoint.heads import open_heads, read_token_map
from tgi_trio.shard.checkpoint.lookup import open_checkpoint
from tgi_trio.shard.torch_backend.attention.interface import AttentionLayer
from tgi_trio.shard.torch_backend.drafting.assistant import AssistantWeights, TorchAssistant
from tgi_trio.shard.torch_backend.drafting.assistant_kv import AssistantKv
from tgi_trio.shard.torch_backend.layers.attention.rotary import Rotary
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.loading.target import LoadTarget
from tgi_trio.shard.torch_backend.models.decoder import Decoder
from tgi_trio.shard.torch_backend.models.decoder_loading import DecoderLoader
from tgi_trio.shard.torch_backend.weights import WeightSource


def find_assistant(
    folder: Path | None,
    config: ModelConfig,
    model: Decoder,
    target: LoadTarget,
    kv_dtype: torch.dtype | None,
) -> TorchAssistant | None:
    """Load the assistant of a model, if `folder` holds one: on every rank, weights on rank 0 alone.

    `kv_dtype`: of the model's K and V, None for `target`'s. Raises ModelLoadError if files cannot
    be used.
    """
    kind = None if folder is None else find_kind(folder)
    if folder is None or kind is None or not kind.reads_kv:
        return None
    base = model.spec
    spec = read_heads(folder, hidden=base.hidden_size, vocabulary=base.vocab_size)
    if not isinstance(spec, AssistantSpec):
        raise TypeError(f"{kind.word} is no assistant")
    decoder = spec.reading(base)
    sources = [layer.reads_layer for layer in decoder.layers if layer.reads_layer is not None]
    kv = AssistantKv(model, sources, kv_dtype or target.dtype, target.device, target.ranks)
    weights = None
    if target.ranks is None or target.ranks.rank == 0:
        weights = _load_weights(spec, decoder, config, model, target, kv.places)
    return TorchAssistant(
        weights, kv, dtype=target.dtype, device=target.device, alone=target.ranks is None
    )


def _load_weights(
    spec: AssistantSpec,
    decoder: DecoderSpec,
    config: ModelConfig,
    model: Decoder,
    target: LoadTarget,
    places: Mapping[int, AttentionLayer],
) -> AssistantWeights:
    with open_heads(spec) as files, torch.inference_mode():
        source = WeightSource(files, dtype=target.dtype, device=target.device)
        loader = _AssistantLoader(decoder, source, places)

        def linear(role: str) -> Linear:
            whole = source.linear(spec.linears[role], every_unit, None)
            whole.pack()
            return whole

        layers, head = loader.parts(whole_head=not spec.clusters)
        order = read_token_map(spec, decoder.vocab_size)
        return AssistantWeights(
            spec=spec,
            decoder=layers,
            entry=linear("entry"),
            exit=linear("exit"),
            clusters=linear("clusters") if spec.clusters else None,
            head=head,
            order=None
            if order is None
            else torch.from_numpy(order).to(target.device).view(spec.clusters, -1),
            embedding=_whole_embedding(config, model, target),
            embedding_scale=model.spec.embedding_scale,
            norm=model.final_norm,
        )


def _whole_embedding(config: ModelConfig, model: Decoder, target: LoadTarget) -> torch.Tensor:
    """Return the model's embedding, of which a rank may have a part only."""
    if model.ranks is None:
        return model.embedding
    alone, base = replace(target, group=None), model.spec
    with open_checkpoint(config, base.names.base, writable=True) as checkpoint:
        source = alone.weights(checkpoint)
        return source.weight(outer_refs(base).embedding, every_unit).clone()


class _AssistantLoader(DecoderLoader):
    """Loads layers whose K and V are in another model's cache."""

    def __init__(
        self, spec: DecoderSpec, source: WeightSource, places: Mapping[int, AttentionLayer]
    ) -> None:
        """`places`: where the K and V of that model's layers are, by the layer's number."""
        super().__init__(spec, source)
        self._places = places

    def attention_shape(self, index: int, layer: LayerSpec, refs: AttentionRefs) -> AttentionLayer:
        if layer.reads_layer is None:
            raise ValueError(f"layer {index} reads no K and V")
        return replace(
            self._places[layer.reads_layer],
            heads=self.spec.heads,
            scale=layer.scale,
            window=layer.window,
            reads_only=True,
        )

    def parts(self, *, whole_head: bool) -> tuple[Decoder, torch.Tensor]:
        """Return the layers with their final norm, and the head's rows [vocabulary, features].

        `whole_head`: all rows are multiplied at a time, and packed for that.
        """
        outer = outer_refs(self.spec)
        rows = self.weight(outer.embedding if self.spec.tied_head else outer.head)
        head = Linear(rows)
        if whole_head:
            head.pack()
        layers = self.layers()
        decoder = Decoder(
            self.spec,
            layers=layers,
            rotaries=[Rotary(rotary, self.source.device) for rotary in self.rotaries],
            embedding=rows.new_empty((0, self.spec.hidden_size)),
            positions=None,
            embedding_norm=None,
            final_norm=self.optional_norm(outer.final_norm),
            head=head,
        )
        return decoder, rows
