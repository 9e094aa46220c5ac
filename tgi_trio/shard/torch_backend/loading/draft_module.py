"""Loads a trained drafter in torch: heads, an EAGLE drafter, layers of the model's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch

from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.model.config import ModelConfig
from tgi_trio.model.matrices.decoder import outer_refs
from tgi_trio.model.speculators.eagle import check_hidden_states
from tgi_trio.model.speculators.eagle_one import EagleOneSpec
from tgi_trio.model.speculators.mtp import need_mtp
from tgi_trio.model.speculators.recognise import find_kind, read_heads
from tgi_trio.model.speculators.spec import EagleSpec
from tgi_trio.settings.records import MTP
from tgi_trio.shard.checkpoint.lookup import open_checkpoint
from tgi_trio.shard.checkpoint.rounding.encoding import Encoding
from tgi_trio.shard.speculation.mtp import MtpLayers, join_layers
from tgi_trio.shard.torch_backend.drafting.eagle import TorchEagle, load_eagle
from tgi_trio.shard.torch_backend.drafting.eagle_one import TorchEagleOne
from tgi_trio.shard.torch_backend.drafting.heads import TorchHeads, load_heads
from tgi_trio.shard.torch_backend.drafting.mtp import TorchMtp
from tgi_trio.shard.torch_backend.drafting.mtp_streams import show_streams
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.loading.mtp import load_mtp
from tgi_trio.shard.torch_backend.loading.target import LoadTarget
from tgi_trio.shard.torch_backend.models.decoder import Decoder
from tgi_trio.shard.torch_backend.models.decoder_loading import DecoderLoader

DraftModule: TypeAlias = TorchHeads | TorchEagle | TorchMtp | MtpLayers


def load_draft_module(
    settings: ShardSettings,
    config: ModelConfig,
    model: Decoder,
    target: LoadTarget,
    encoding: Encoding | None,
) -> DraftModule | None:
    """Load what was trained to draft for a model, None if nothing was named.

    Only on rank 0, which chooses tokens. What reads the model's K and V is loaded on every rank
    instead, by `find_assistant`.
    """
    opened = _WholeModel(config, model, target, encoding)
    if settings.drafter == MTP:
        return opened.load_mtp()
    folder = settings.draft_model
    kind = None if folder is None else find_kind(folder)
    if folder is None or kind is None or kind.reads_kv:
        return None
    return opened.load_heads(folder)


class _WholeModel:
    """A model whose whole embedding and head a drafter may use, however ranks divide them."""

    def __init__(
        self, config: ModelConfig, model: Decoder, target: LoadTarget, encoding: Encoding | None
    ) -> None:
        self._config = config
        self._model = model
        self._target = target
        self._encoding = encoding

    def load_heads(self, folder: Path) -> TorchHeads | TorchEagle:
        """Load the drafter in a folder of its own."""
        base, target = self._model.spec, self._target
        spec = read_heads(folder, hidden=base.hidden_size, vocabulary=base.vocab_size)
        if isinstance(spec, EagleSpec):
            check_hidden_states(folder, base)
            self._model.taps = spec.taps(len(self._model.layers))
            make: Callable[..., TorchEagle] = TorchEagle
            if isinstance(spec, EagleOneSpec):
                head = self._model.head if self._model.ranks is None else self._head()
                make = partial(TorchEagleOne, norm=self._model.final_norm, head=head)
            return load_eagle(
                spec,
                vocabulary=base.vocab_size,
                dtype=target.dtype,
                device=target.device,
                embedding=self._embedding,
                make=make,
            )
        return load_heads(
            spec,
            self._model,
            dtype=target.dtype,
            device=target.device,
            whole_head=self._head,
        )

    def load_mtp(self) -> TorchMtp | MtpLayers | None:
        """Load the layers of the model's own checkpoint."""
        specs = need_mtp(self._config, self._model.spec)
        if specs[0].decoder.hyper or specs[0].decoder.gated_streams:
            show_streams(self._model)
        embedding = self._embedding()
        head = self._model.head if self._model.ranks is None else self._head()
        with self._loader() as loader:
            return join_layers(
                [load_mtp(spec, loader.source, embedding, head, self._model) for spec in specs]
            )

    @contextmanager
    def _loader(self) -> Iterator[DecoderLoader]:
        base, alone = self._model.spec, replace(self._target, group=None)
        opened = open_checkpoint(
            self._config, base.names.base, encoding=self._encoding, writable=True
        )
        with opened as checkpoint, torch.inference_mode():
            yield DecoderLoader(base, alone.weights(checkpoint))

    def _embedding(self) -> torch.Tensor:
        if self._model.ranks is None:
            return self._model.embedding
        with self._loader() as loader:
            return loader.weight(outer_refs(self._model.spec).embedding)

    def _head(self) -> Linear:
        with self._loader() as loader:
            return loader.head(loader.weight(outer_refs(self._model.spec).embedding))
