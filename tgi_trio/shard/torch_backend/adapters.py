"""LoRA adapters of a decoder in torch: loaded beside the steps, installed between two of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from tgi_trio.errors import ConfigurationError
from tgi_trio.ipc.adapters import AdapterOrder
from tgi_trio.model.adapters.sites import Site
from tgi_trio.model.matrices import Share, Units
from tgi_trio.model.spec import DecoderSpec
from tgi_trio.model.split import unit_share
from tgi_trio.shard.adapters.numbers import read_adapter_numbers
from tgi_trio.shard.contract import LoadedAdapter
from tgi_trio.shard.torch_backend.layers.adapted import (
    AdaptedLinear,
    AdapterTable,
    PackedSites,
    packed_bytes,
)
from tgi_trio.shard.torch_backend.layers.mlp import DenseMlp
from tgi_trio.shard.torch_backend.models.decoder import Decoder


@dataclass(frozen=True, slots=True)
class _Loaded:
    sha256: bytes
    rank: int
    nbytes: int
    packed: PackedSites


class TorchAdapters:
    """Implements `AdapterHost` for one rank's decoder, whose linears it wraps."""

    def __init__(
        self,
        decoder: Decoder,
        dtype: torch.dtype,
        *,
        max_rank: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """`max_rank`: of adapters; `rank`, `world_size`: this one among the model's ranks."""
        self.table = AdapterTable()
        self._spec: DecoderSpec = decoder.spec
        self._dtype = dtype
        self._max_rank = max_rank
        self._share: Share = partial(_share, rank=rank, ranks=world_size)
        for index, layer in enumerate(decoder.layers):
            if layer.latent is None:
                layer.qkv = AdaptedLinear(layer.qkv, Site(index, "qkv"), self.table)
                layer.output = AdaptedLinear(layer.output, Site(index, "output"), self.table)
            if isinstance(layer.mlp, DenseMlp):
                layer.mlp.up = AdaptedLinear(layer.mlp.up, Site(index, "inner"), self.table)
                layer.mlp.down = AdaptedLinear(layer.mlp.down, Site(index, "down"), self.table)

    def load(self, order: AdapterOrder) -> LoadedAdapter:
        numbers = read_adapter_numbers(
            order.folder,
            self._spec,
            self._share,
            max_rank=self._max_rank,
            expected=order.sha256,
        )
        packed = self.table.pack(numbers, self._dtype)
        return _Loaded(numbers.sha256, numbers.rank, packed_bytes(packed), packed)

    def install(self, number: int, loaded: LoadedAdapter) -> None:
        if not isinstance(loaded, _Loaded):
            raise TypeError(f"{type(loaded).__name__} was loaded by another host")
        self.table.packed[number] = loaded.packed

    def drop(self, number: int) -> None:
        self.table.packed.pop(number, None)


def refuse_adapters(why: str) -> ConfigurationError:
    """Return the error of a start with adapters that nothing can serve."""
    return ConfigurationError(
        f"--lora-adapters and --adapter-updates cannot be served: {why}. Merge an adapter into its "
        "base: give its folder to --model-id"
    )


def _share(units: Units, rank: int, ranks: int) -> slice:
    return unit_share(units, rank, ranks)
