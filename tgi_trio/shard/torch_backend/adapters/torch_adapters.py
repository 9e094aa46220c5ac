"""LoRA adapters of a decoder in torch: loaded while steps run, installed between two of them.

They use torch's own operations, for CPUs and for devices that run no kernels of ours;
`device_adapters.py` is for those that do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tgi_trio.errors import ConfigurationError
from tgi_trio.ipc.adapters import AdapterOrder
from tgi_trio.model.adapters.experts import has_own_experts
from tgi_trio.model.adapters.sites import (
    EVERYTHING,
    AdapterScope,
    Site,
    adapts_head,
    head_site,
)
from tgi_trio.model.config import ModelConfig
from tgi_trio.model.split import unit_share
from tgi_trio.shard.adapter_host import AdapterHost, LoadedAdapter
from tgi_trio.shard.adapters.reader import AdapterReader
from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.torch_backend.layers.adapters.adapted_latents import AdaptedHeads
from tgi_trio.shard.torch_backend.layers.adapters.adapted_linear import (
    AdaptedLinear,
    AdapterTable,
    PackedLookups,
    PackedRows,
    PackedSites,
    packed_bytes,
)
from tgi_trio.shard.torch_backend.layers.attention.latent import LatentProjections
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.layers.mlp import DenseMlp, ExpertsMlp
from tgi_trio.shard.torch_backend.models.decoder import Decoder


class StepAdapters(AdapterHost, Protocol):
    """The interface of a runner's steps to adapters."""

    nbytes: int  # of memory that is allocated in advance

    def begin(self, plan: StepPlan) -> None:
        """Prepare the adapters of the next step."""
        ...

    def idle(self, plan: StepPlan) -> AbstractContextManager[None]:
        """Give all rows an adapter inside the block, to measure memory."""
        ...

    def choosing(self, places: NDArray[np.int64]) -> AbstractContextManager[None]:
        """Have the head use, inside the block, the adapters of other tokens of the step.

        `places` [n]: their indices. Otherwise it uses those of the tokens after which others are
        chosen.
        """
        ...

    def stage(self) -> None:
        """Have the linears use the adapters of the last `begin`, in a step that is not recorded."""
        ...

    def warm_up(self) -> None:
        """Compile everything that steps will launch."""
        ...


@dataclass(frozen=True, slots=True)
class _Loaded:
    sha256: bytes
    rank: int
    nbytes: int
    packed: PackedSites
    embedded: PackedRows | None
    looked_up: PackedLookups | None


class TorchAdapters:
    """Implements `StepAdapters` for one rank's decoder, whose linears it wraps."""

    nbytes = 0

    def __init__(
        self,
        config: ModelConfig,
        decoder: Decoder,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_rank: int,
        scope: AdapterScope = EVERYTHING,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """`max_rank`, `scope`: of adapters; `rank`, `world_size`: of the model's ranks."""
        self.table = AdapterTable(device)
        share = partial(unit_share, rank=rank, ranks=world_size)
        self._reader = AdapterReader(
            config, decoder.spec, share, max_rank, adds_biases=rank == 0, scope=scope
        )
        self._dtype = dtype
        wrap_layers(decoder, self._wrap)
        for site, latent in find_latents(decoder) if scope.latents else ():
            latent.changes = AdaptedHeads(latent.spec, site, self.table)
        if scope.experts:
            for index, mixture in find_mixtures(decoder):
                self._wrap_experts(index, mixture)
        if scope.tokens or scope.lookups:
            decoder.change_embedded = self.table
        if scope.head and adapts_head(decoder.spec):
            head = AdaptedLinear(decoder.head, head_site(decoder.spec), self.table)
            decoder.choose_head = lambda: head if self.table.chosen else head.base

    @torch.inference_mode()
    def load(self, order: AdapterOrder) -> LoadedAdapter:
        with self._reader.open(order) as numbers:
            packed = self.table.pack(numbers, self._dtype)
        rows: PackedRows | None = None
        looked_up: PackedLookups | None = None
        if (own := numbers.embedded) is not None:
            rows = self.table.pack_rows(own, self._dtype)
        if (pair := numbers.looked_up) is not None:
            looked_up = self.table.pack_looked_up(pair, self._dtype)
        size = packed_bytes(packed)
        size += sum(each.nbytes for each in (*(rows or ()), *(looked_up or ())))
        return _Loaded(numbers.sha256, numbers.rank, size, packed, rows, looked_up)

    def install(self, number: int, loaded: LoadedAdapter) -> None:
        if not isinstance(loaded, _Loaded):
            raise TypeError(f"{type(loaded).__name__} was loaded by another host")
        self.table.packed[number] = loaded.packed
        if loaded.embedded is not None:
            self.table.embedded[number] = loaded.embedded
        if loaded.looked_up is not None:
            self.table.looked_up[number] = loaded.looked_up

    def drop(self, number: int) -> None:
        self.table.packed.pop(number, None)
        self.table.embedded.pop(number, None)
        self.table.looked_up.pop(number, None)

    def begin(self, plan: StepPlan) -> None:
        self.table.begin(plan)

    def idle(self, plan: StepPlan) -> AbstractContextManager[None]:
        self.table.begin(plan)  # adapters take little memory compared with activations
        return nullcontext()

    def choosing(self, places: NDArray[np.int64]) -> AbstractContextManager[None]:
        return self.table.choosing(places)

    def stage(self) -> None:
        """Do nothing: `begin` has done it."""

    def warm_up(self) -> None:
        """Do nothing: nothing is compiled."""

    def _wrap(self, site: Site, base: Linear) -> Linear:
        return AdaptedLinear(base, site, self.table)

    def _wrap_experts(self, index: int, mixture: ExpertsMlp) -> None:
        for i, expert in enumerate(mixture.experts):
            expert.up = self._wrap(Site(index, "expert inner", i), expert.up)
            expert.down = self._wrap(Site(index, "expert down", i), expert.down)
        mixture.tell = self.table.gather


def wrap_layers(decoder: Decoder, wrap: Callable[[Site, Linear], Linear]) -> None:
    """Replace every linear of layers that adapters may change by the result of `wrap`.

    Those of experts, which only some tokens read, are left.
    """
    for index, layer in enumerate(decoder.layers):
        attention = layer.attention
        if layer.shared is not None:
            continue
        if attention is not None and attention.shared_key is None:
            attention.qkv = wrap(Site(index, "qkv"), attention.qkv)
            latent = attention.latent
            if latent is not None and latent.query_up is not None and latent.gate_up is None:
                latent.query_up = wrap(Site(index, "query up"), latent.query_up)
            attention.output = wrap(Site(index, "output"), attention.output)
        if isinstance(layer.mlp, DenseMlp):
            layer.mlp.up = wrap(Site(index, "inner"), layer.mlp.up)
            layer.mlp.down = wrap(Site(index, "down"), layer.mlp.down)
        if isinstance(layer.mlp, ExpertsMlp) and (shared := layer.mlp.shared) is not None:
            shared.up = wrap(Site(index, "shared inner"), shared.up)
            shared.down = wrap(Site(index, "shared down"), shared.down)
            if (router := layer.mlp.shared_router) is not None:
                layer.mlp.shared_router = wrap(Site(index, "shared router"), router)


def find_latents(decoder: Decoder) -> Iterator[tuple[Site, LatentProjections]]:
    """Yield the projections of every layer over latents, with the site of what expands these."""
    for index, layer in enumerate(decoder.layers):
        attention = (
            layer.attention if layer.shared is None and layer.cross_attention is None else None
        )
        if attention is not None and (latent := attention.latent) is not None:
            yield Site(index, "latent up"), latent


def find_mixtures(decoder: Decoder) -> Iterator[tuple[int, ExpertsMlp]]:
    """Yield every layer's number whose experts adapters may change, with its mixture."""
    for index, layer in enumerate(decoder.layers):
        own = has_own_experts(decoder.spec.layers[index])
        own &= layer.shared is None and layer.cross_attention is None
        mixture = layer.mlp if layer.beside is None else layer.beside.experts
        if own and isinstance(mixture, ExpertsMlp):
            yield index, mixture


def refuse_adapters(why: str) -> ConfigurationError:
    """Return the error for adapters that this model or device cannot serve."""
    return ConfigurationError(
        f"--lora-adapters and --adapter-updates cannot be served: {why}. Merge an adapter into its "
        "base: give its folder to --model-id"
    )
