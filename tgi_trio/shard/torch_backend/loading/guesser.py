"""Loads a trained drafter in torch: speculation heads, or the layer of an EAGLE-3 drafter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from tgi_trio.model.config import ModelConfig
from tgi_trio.model.decoder_matrices import outer_refs
from tgi_trio.model.speculators.eagle import check_hidden_states
from tgi_trio.model.speculators.recognise import read_heads
from tgi_trio.model.speculators.spec import EagleSpec
from tgi_trio.shard.checkpoint.lookup import open_checkpoint
from tgi_trio.shard.checkpoint.rounding.encoding import Encoding
from tgi_trio.shard.torch_backend.guessing.eagle import TorchEagle, load_eagle
from tgi_trio.shard.torch_backend.guessing.heads import TorchHeads, load_heads
from tgi_trio.shard.torch_backend.layers.linear import Linear
from tgi_trio.shard.torch_backend.loading.target import LoadTarget
from tgi_trio.shard.torch_backend.models.decoder import Decoder
from tgi_trio.shard.torch_backend.models.decoder_loading import DecoderLoader


def load_guesser(
    folder: Path,
    config: ModelConfig,
    model: Decoder,
    target: LoadTarget,
    encoding: Encoding | None,
) -> TorchHeads | TorchEagle:
    """Load the drafter of a model; only on rank 0, which chooses tokens."""
    base = model.spec
    spec = read_heads(folder, hidden=base.hidden_size, vocabulary=base.vocab_size)

    @contextmanager
    def whole_model() -> Iterator[DecoderLoader]:
        alone = replace(target, group=None)
        opened = open_checkpoint(config, base.names.base, encoding=encoding, writable=True)
        with opened as checkpoint, torch.inference_mode():
            yield DecoderLoader(base, alone.weights(checkpoint))

    def whole_embedding() -> torch.Tensor:
        if model.ranks is None:
            return model.embedding
        with whole_model() as loader:
            return loader.weight(outer_refs(base).embedding)

    def whole_head() -> Linear:
        with whole_model() as loader:
            return loader.head(loader.weight(outer_refs(base).embedding))

    if isinstance(spec, EagleSpec):
        check_hidden_states(folder, base)
        model.taps = spec.taps(len(model.layers))
        return load_eagle(
            spec,
            vocabulary=base.vocab_size,
            dtype=target.dtype,
            device=target.device,
            embedding=whole_embedding,
        )
    return load_heads(spec, model, dtype=target.dtype, device=target.device, whole_head=whole_head)
