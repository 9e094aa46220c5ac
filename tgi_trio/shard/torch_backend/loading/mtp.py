"""Loads the layers of a model's own checkpoint that guess further tokens, in torch."""

from __future__ import annotations

import torch

from tgi_trio.model.decoder_matrices import outer_refs
from tgi_trio.model.guessing_layers import MtpSpec
from tgi_trio.shard.torch_backend.guessing.mtp import MtpWeights, TorchMtp
from tgi_trio.shard.torch_backend.layers.linear import Linear
from tgi_trio.shard.torch_backend.layers.rotary import Rotary
from tgi_trio.shard.torch_backend.models.decoder import Decoder
from tgi_trio.shard.torch_backend.models.decoder_loading import DecoderLoader
from tgi_trio.shard.torch_backend.weights import WeightSource


def load_mtp(
    spec: MtpSpec, source: WeightSource, embedding: torch.Tensor, head: Linear, model: Decoder
) -> TorchMtp:
    """Read such a layer, whole; raises ModelLoadError if its files cannot be used.

    `embedding`, `head`: those of `model`, whole.
    """
    loader = DecoderLoader(spec.decoder, source)
    layers = loader.layers()
    fuse = loader.linear(spec.fuse)
    fuse.pack()
    weights = MtpWeights(
        decoder=Decoder(
            spec.decoder,
            layers=layers,
            rotaries=[Rotary(rotary, source.device) for rotary in loader.rotaries],
            embedding=embedding,
            positions=None,
            embedding_norm=None,
            final_norm=loader.optional_norm(outer_refs(spec.decoder).final_norm),
            head=head,
        ),
        embedding_norm=loader.norm(spec.embedding_norm),
        state_norm=loader.norm(spec.state_norm),
        fuse=fuse,
        states_first=spec.states_first,
    )
    return TorchMtp(
        weights,
        model_norm=model.final_norm,
        embedding=embedding,
        head=head,
        dtype=source.dtype,
        device=source.device,
    )
