"""Loads what mixes several hidden states of a token: before, in and behind a decoder's layers."""

from __future__ import annotations

import torch

from tgi_trio.model.matrices.roles import (
    HyperRefs,
    LayerGatesRefs,
    LayerHyperRefs,
    LayerStreamsRefs,
    StreamsRefs,
)
from tgi_trio.model.specs.decoder import HyperSpec, StreamsSpec
from tgi_trio.model.specs.gated_streams import GatedStreamsSpec
from tgi_trio.shard.torch_backend.layers.streams.alternating_parts import Routing
from tgi_trio.shard.torch_backend.layers.streams.alternating_updates import LayerStreams, Streams
from tgi_trio.shard.torch_backend.layers.streams.gated_streams import LayerGates
from tgi_trio.shard.torch_backend.layers.streams.hyper_connections import (
    HyperConnection,
    HyperEnds,
    LayerHyper,
)
from tgi_trio.shard.torch_backend.layers.streams.hyper_weights import HyperWeights
from tgi_trio.shard.torch_backend.models.attention_loading import AttentionLoader


def load_streams(loader: AttentionLoader, refs: StreamsRefs | None) -> Streams | None:
    """Return what makes the states of Gemma 3n and joins them; None: there is one state."""
    if refs is None:
        return None
    into, out = ([loader.linear(ref) for ref in side] for side in (refs.into, refs.out))
    for linear in (*into, *out):
        linear.pack()
    return Streams(into, out)


def load_layer_streams(
    loader: AttentionLoader, refs: LayerStreamsRefs | None, spec: StreamsSpec | None
) -> LayerStreams | None:
    """Return how a layer of Gemma 3n reads and writes several states; None: it does not."""
    if refs is None or spec is None:
        return None
    return LayerStreams(
        spec,
        routing=Routing(loader.norm(refs.router_norm), loader.weight(refs.router)),
        prediction=loader.weight(refs.prediction),
        correction=loader.weight(refs.correction),
        scale=loader.source.vector(refs.scale.name, refs.scale.size),
        detour_down=loader.linear(refs.detour_down),
        detour_up=loader.linear(refs.detour_up),
        detour_norm=loader.norm(refs.detour_norm),
    )


def load_hyper_ends(
    loader: AttentionLoader, refs: HyperRefs | None, spec: HyperSpec | None
) -> HyperEnds | None:
    """Return what makes the states of hyper-connections and joins them; None: there is one."""
    if spec is None:
        return None
    weights = None if refs is None else _load_hyper(loader, refs)
    return HyperEnds(spec, weights, invariant=loader.source.invariant)


def load_layer_hyper(
    loader: AttentionLoader, refs: LayerHyperRefs | None, spec: HyperSpec | None
) -> LayerHyper | None:
    """Return a layer's hyper-connections, None if it has none."""
    if refs is None or spec is None:
        return None
    both = (HyperConnection(spec, _load_hyper(loader, part)) for part in (refs.attention, refs.mlp))
    return LayerHyper(*both)


def load_layer_gates(
    loader: AttentionLoader, refs: LayerGatesRefs | None, spec: GatedStreamsSpec | None
) -> LayerGates | None:
    """Return the gates between a layer and several states, None if it has none."""
    if refs is None or spec is None:
        return None
    both = (loader.stream_gates(part, spec) for part in (refs.attention, refs.mlp))
    return LayerGates(*both)


def _load_hyper(loader: AttentionLoader, refs: HyperRefs) -> HyperWeights:
    mix, base, scale = (
        loader.tensor(ref, torch.float32) for ref in (refs.mix, refs.base, refs.scale)
    )
    invariant = loader.source.invariant
    return HyperWeights(mix, base, scale, loader.spec.norm_eps, invariant=invariant)
