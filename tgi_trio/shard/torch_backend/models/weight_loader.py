"""Loads this rank's part of linears, norms and small tensors, of which models are made."""

from __future__ import annotations

import torch

from tgi_trio.model.matrices.references import LinearRef, NormRef, TensorRef, Units, VectorRef
from tgi_trio.model.matrices.roles import GatesRefs
from tgi_trio.model.specs.decoder import NormKind
from tgi_trio.model.specs.gated_streams import GatedStreamsSpec
from tgi_trio.model.split import unit_share
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.layers.norm import DividedNorm, Norm
from tgi_trio.shard.torch_backend.layers.streams.gated_streams import StreamGates, StreamNorm
from tgi_trio.shard.torch_backend.layers.vocabulary import Gathering
from tgi_trio.shard.torch_backend.weights import WeightSource


class WeightLoader:
    """Loads this rank's part of weights that a model's spec names."""

    def __init__(
        self, source: WeightSource, norm: NormKind, ranks: Gathering | None = None
    ) -> None:
        """`norm`: the kind of norms that have none of their own.

        `ranks`: those that divide every layer, None: each is whole.
        """
        self.source = source
        self.ranks = ranks
        self._norm = norm

    def share(self, units: Units) -> slice:
        """Return this rank's share of some units; raises ModelLoadError if they cannot be split."""
        return unit_share(units, self.source.rank, self.source.world_size)

    def linear(self, ref: LinearRef) -> Linear:
        """Return this rank's part of a linear, with its bias if this rank is to add it."""
        whole = self.source.linear(ref, self.share, self.bias(ref))
        if len(ref.pieces) > 1:  # so that the next is concatenated in the same memory
            whole.pack()
        return whole

    def weight(self, ref: LinearRef) -> torch.Tensor:
        """Return this rank's part [outputs, inputs] as plain numbers; see `WeightSource.weight`."""
        return self.source.weight(ref, self.share)

    def bias(self, ref: LinearRef) -> torch.Tensor | None:
        """Return the bias [outputs], None if there is none or another rank adds it."""
        return None if ref.partial and self.source.rank else self.source.bias(ref, self.share)

    def vector(self, ref: VectorRef) -> torch.Tensor:
        """Return a float32 vector [size], whole on every rank."""
        return self.source.vector(ref.name, ref.size, dtype=torch.float32)

    def tensor(self, ref: TensorRef, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return this rank's part of a small tensor in `dtype` (default: the model's)."""
        (span,) = ref.units.spans(self.share(ref.units))
        cut = (*[slice(None)] * ref.axis, span)
        return self.source.tensor(ref.name, ref.shape, cut, dtype)

    def optional_norm(self, ref: NormRef | None) -> Norm | None:
        """Return a norm, None if there is none."""
        return None if ref is None else self.norm(ref)

    def norm(self, ref: NormRef) -> Norm:
        """Return a norm, which is whole on every rank."""
        weight, bias = (
            self.source.vector(name, ref.size) if name else None for name in (ref.weight, ref.bias)
        )
        kind, invariant = ref.kind or self._norm, self.source.invariant
        return Norm(kind, weight, bias, ref.eps, ref.size, invariant=invariant)

    def divided_norm(self, ref: NormRef | None) -> DividedNorm | None:
        """Return a norm of features that ranks divide, None if there is none."""
        return None if ref is None else DividedNorm(self.norm(ref), self.ranks)

    def stream_norm(self, ref: NormRef, count: int) -> StreamNorm:
        """Return a norm of each of `count` hidden states, which is whole on every rank."""
        weight = self.source.vector(ref.weight, ref.size)
        return StreamNorm(self._norm, weight, ref.eps, count)

    def stream_gates(self, refs: GatesRefs, streams: GatedStreamsSpec) -> StreamGates:
        """Return gates of a token's hidden states, which are whole on every rank."""
        norm = self.stream_norm(refs.norm, streams.count)
        inner, gates = self.linear(refs.inner), self.linear(refs.gates)
        return StreamGates(streams.count, streams.rank, norm, inner, gates)
