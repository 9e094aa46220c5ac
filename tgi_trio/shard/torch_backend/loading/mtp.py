"""Loads the layers of a model's own checkpoint that draft further tokens, in torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tgi_trio.model.matrices.decoder import outer_refs
from tgi_trio.model.mtp_layers import MtpSpec
from tgi_trio.shard.torch_backend.drafting.mtp import MtpWeights, TorchMtp
from tgi_trio.shard.torch_backend.drafting.mtp_streams import (
    GatedJoining,
    HyperJoining,
    Joining,
    OpenEnds,
    StreamsMtp,
)
from tgi_trio.shard.torch_backend.layers.attention.rotary import Rotary
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.models.decoder import Decoder
from tgi_trio.shard.torch_backend.models.decoder_loading import DecoderLoader
from tgi_trio.shard.torch_backend.models.gated import GatedDecoder
from tgi_trio.shard.torch_backend.models.stream_loading import load_hyper_ends
from tgi_trio.shard.torch_backend.weights import WeightSource


def load_mtp(
    spec: MtpSpec, source: WeightSource, embedding: torch.Tensor, head: Linear, model: Decoder
) -> TorchMtp:
    """Read such a layer, whole; raises ModelLoadError if its files cannot be used.

    `embedding`, `head`: those of `model`, whole.
    """
    loader = DecoderLoader(spec.decoder, source)
    joining = _load_joining(loader)
    fuse = loader.linear(spec.fuse)
    fuse.pack()
    weights = MtpWeights(
        decoder=_load_layers(loader, joining, embedding, head),
        embedding_norm=loader.norm(spec.embedding_norm),
        state_norm=loader.norm(spec.state_norm),
        fuse=fuse,
        states_first=spec.states_first,
        fuse_embedding=loader.optional_linear(spec.fuse_embedding),
    )
    make = TorchMtp if joining is None else partial(StreamsMtp, joining=joining)
    return make(
        weights,
        model_norm=model.final_norm,
        embedding=embedding,
        head=head,
        dtype=source.dtype,
        device=source.device,
    )


def _load_joining(loader: DecoderLoader) -> Joining | None:
    """Return what joins the hidden states of a token, None if it has one."""
    spec, outer = loader.spec, outer_refs(loader.spec)
    if spec.gated_streams is not None and outer.gates is not None:
        gates = loader.stream_gates(outer.gates, spec.gated_streams)
        gates.pack()
        return GatedJoining(gates)
    ends = load_hyper_ends(loader, outer.hyper, spec.hyper)
    return None if ends is None else HyperJoining(ends)


def _load_layers(
    loader: DecoderLoader, joining: Joining | None, embedding: torch.Tensor, head: Linear
) -> Decoder:
    """Return the decoder layers, which read states and leave states, and the norm behind them."""
    kind: Callable[..., Decoder] = Decoder
    if isinstance(joining, GatedJoining):
        kind = partial(GatedDecoder, gates=joining.gates)
    return kind(
        loader.spec,
        layers=loader.layers(),
        rotaries=[Rotary(rotary, loader.source.device) for rotary in loader.rotaries],
        embedding=embedding,
        positions=None,
        embedding_norm=None,
        final_norm=loader.optional_norm(outer_refs(loader.spec).final_norm),
        head=head,
        hyper=OpenEnds(joining.ends.spec, None) if isinstance(joining, HyperJoining) else None,
    )
