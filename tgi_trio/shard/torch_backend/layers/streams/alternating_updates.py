"""Several hidden states for each token, of which a layer computes one: Alternating Updates.

On a device, what lies between two products is one launch (`alternating_kernels.py`).
Sources: Baykal et al. 2023; transformers' Gemma 3n ("AltUp", "Laurel").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from tgi_trio.model.specs.decoder import StreamsSpec
from tgi_trio.shard.torch_backend.layers.detour import PendingExpansion
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.layers.norm import Norm
from tgi_trio.shard.torch_backend.layers.streams.alternating_parts import Added, Routing
from tgi_trio.shard.torch_backend.padding import next_power_of_2
from tgi_trio.shard.torch_backend.torch_device import runs_kernels

_LEAST = 1e-5  # least mean square whose root is divided by
_MOST = 1 << 15  # numbers of all states of a token that a program holds
_BOTH = 2.0**-0.5  # scales the sum of attention's and the detour's outputs


@dataclass(frozen=True, slots=True, eq=False)
class Streams:
    """The projections before the first layer and after the last."""

    into: Sequence[Linear]
    out: Sequence[Linear]

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """Return the streams [count, T, hidden] of `x` [T, hidden], which is the first of them."""
        others = [linear(x) for linear in self.into]
        if others and _in_kernels(x, len(others) + 1):
            from tgi_trio.shard.torch_backend.layers.streams import (
                alternating_kernels,  # imports Triton
            )

            return alternating_kernels.match(x, torch.stack(others), _LEAST, joins=False)
        return torch.stack([x, *(_as_large(other, x) for other in others)])

    def join(self, streams: torch.Tensor, added: Added | None) -> torch.Tensor:
        """Return the mean [T, hidden] of the projected `streams` [count, T, hidden].

        `added`: by the last layer.
        """
        first = streams[0]
        kernels = bool(self.out) and _in_kernels(first, len(streams))
        if kernels:
            from tgi_trio.shard.torch_backend.layers.streams import (
                alternating_kernels,  # imports Triton
            )

            others = streams[1:] if added is None else alternating_kernels.add(streams, added)
        else:
            others = _add(streams, added)[1:]
        projected = [linear(stream) for linear, stream in zip(self.out, others, strict=True)]
        if kernels:
            return alternating_kernels.match(first, torch.stack(projected), _LEAST, joins=True)
        return torch.stack([first, *(_as_large(each, first) for each in projected)]).mean(dim=0)

    def nbytes(self) -> int:
        return sum(linear.nbytes() for linear in (*self.into, *self.out))


@dataclass(frozen=True, slots=True, eq=False)
class LayerStreams:
    """A layer's part."""

    spec: StreamsSpec
    routing: Routing
    prediction: torch.Tensor  # [count * count, count]
    correction: torch.Tensor  # [count, count]
    scale: torch.Tensor  # [hidden]
    detour_down: Linear
    detour_up: Linear
    detour_norm: Norm

    def predict(
        self, streams: torch.Tensor, added: Added | None, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a prediction of `streams` [count, T, hidden] after the layer, and what it reads.

        That is the norm [T, hidden] of the state that the layer computes, as predicted. `added`: by
        the layer before.
        """
        active = self.spec.active
        if self._in_kernels(streams):
            from tgi_trio.shard.torch_backend.layers.streams import (
                alternating_kernels,  # imports Triton
            )

            return alternating_kernels.predict(
                streams, added, self.routing, self.prediction, active, norm
            )
        streams = _add(streams, added)
        weights = functional.linear(self.routing.of(streams[active]), self.prediction)
        weights = weights.unflatten(-1, (self.spec.count, -1)).transpose(1, 2)
        predicted = torch.matmul(streams.permute(1, 2, 0), weights).permute(2, 0, 1) + streams
        return predicted, norm(predicted[active])

    def expand(self, low: torch.Tensor) -> PendingExpansion:
        """Return the product, yet to be computed, of what `detour_down` said, [T, rank]."""
        return PendingExpansion(self.detour_up, low)

    def join(
        self,
        predicted: torch.Tensor,
        normed: torch.Tensor,
        mixed: torch.Tensor,
        detour: torch.Tensor,
        after: Norm,
        norm: Norm,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the computed state behind attention, and its norm, [T, hidden] each.

        It is the predicted one, what attention says (`mixed`, normalised by `after`), and what it
        reads (`normed`) with a low-rank addition (Laurel): the norm of `detour` [T, hidden].
        """
        active = predicted[self.spec.active]
        if self._in_kernels(predicted):
            from tgi_trio.shard.torch_backend.layers.streams import (
                alternating_kernels,  # imports Triton
            )

            norms = after, self.detour_norm, norm
            return alternating_kernels.join(active, mixed, normed, detour, norms, _BOTH)
        x = (active + after(mixed) + (normed + self.detour_norm(detour))) * _BOTH
        return x, norm(x)

    def correct(
        self, predicted: torch.Tensor, x: torch.Tensor, found: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `predicted` [count, T, hidden], corrected by x + norm(found), which was computed.

        And the input [T, hidden] of the layer's own embeddings.
        """
        active, scale = self.spec.active, self.scale if self.spec.scaled else None
        if self._in_kernels(predicted):
            from tgi_trio.shard.torch_backend.layers.streams import (
                alternating_kernels,  # imports Triton
            )

            return alternating_kernels.correct(
                predicted, x, found, norm, self.routing, self.correction, active, scale
            )
        computed = x + norm(found)
        weights = functional.linear(self.routing.of(computed), self.correction) + 1.0
        missed = computed - predicted[active]
        corrected = missed * weights.t().unsqueeze(-1) + predicted
        return corrected, corrected[active] if scale is None else corrected[active] * scale

    def _in_kernels(self, streams: torch.Tensor) -> bool:
        return _in_kernels(streams, self.spec.count)

    def pack(self) -> None:
        for linear in (self.detour_down, self.detour_up):
            linear.pack()

    def nbytes(self) -> int:
        small = self.routing.router, self.prediction, self.correction, self.scale
        parts = self.routing.norm, self.detour_norm, self.detour_down, self.detour_up
        return sum(each.nbytes for each in small) + sum(part.nbytes() for part in parts)


def holds_streams(count: int, size: int) -> bool:
    """Return whether the kernels hold `count` hidden states of `size` numbers."""
    padded = [next_power_of_2(each) for each in (count, size)]
    return padded[0] * padded[1] <= _MOST


def _in_kernels(x: torch.Tensor, count: int) -> bool:
    return runs_kernels(x.device) and holds_streams(count, x.shape[-1])


def _add(streams: torch.Tensor, added: Added | None) -> torch.Tensor:
    """Return `streams` [count, T, hidden] with what is `added` to all but the first."""
    if added is None:
        return streams
    return torch.cat((streams[:1], streams[1:] + added.norm(added.output)))


def _as_large(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return `x` [T, hidden] with each row's root mean square made that of `like`."""
    wanted = like.square().mean(dim=-1, keepdim=True).sqrt()
    own = x.square().mean(dim=-1, keepdim=True).clamp(min=_LEAST).sqrt()
    return x * wanted / own
