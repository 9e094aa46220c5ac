"""Several hidden states of a token, mixed around attention and MLP: hyper-connections.

Sources: Xie and others 2026 (manifold-constrained hyper-connections); transformers' DeepSeek V4
and, without a mixture, Hunyuan 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from tgi_trio.model.specs.decoder import HyperSpec
from tgi_trio.shard.torch_backend.layers.expert_parts import ExpertParts
from tgi_trio.shard.torch_backend.layers.norm import Norm
from tgi_trio.shard.torch_backend.layers.streams.hyper_weights import HyperWeights
from tgi_trio.shard.torch_backend.torch_device import runs_kernels

_MOST = 1 << 15  # largest hidden size that a program holds

Mixture = torch.Tensor | None


class HyperStates(NamedTuple):
    """The hidden states of a step's tokens, between two parts."""

    streams: torch.Tensor  # [T, count, hidden], contiguous
    # What kernels make the weights of the next part of; None: it has not been computed.
    mixed: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class HyperConnection:
    """The hyper-connection around a layer's attention, or around its MLP."""

    spec: HyperSpec
    weights: HyperWeights

    def enter(
        self, states: HyperStates, norm: Norm | None
    ) -> tuple[torch.Tensor, torch.Tensor, Mixture]:
        """Return what the part reads of the states, and what `leave` needs.

        That is [T, hidden], normalised if there is a `norm`; the weights [T, count] of the part's
        result in each state; and the mixture [T, count, count], to each state (last) from each,
        None: of each state alone.
        """
        streams = states.streams
        if _in_kernels(streams):
            from tgi_trio.shard.torch_backend.layers.streams import hyper_kernels  # imports Triton

            mixed = states.mixed
            mixed = hyper_kernels.mix(self.weights, streams) if mixed is None else mixed
            return hyper_kernels.read(self.spec, self.weights, streams, mixed, norm)
        read, added, mixture = self.weigh(self.weights.of(streams))
        summed = _add_up(read, streams)
        return summed if norm is None else norm(summed), added, mixture

    def weigh(self, parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Mixture]:
        """Return the weights of what is read, of the result, and of streams in streams.

        `parts`: of `HyperWeights.of`.
        """
        spec, count = self.spec, self.spec.count
        scales, bases = self.weights.scale, self.weights.base
        read = torch.sigmoid(parts[:, :count] * scales[0] + bases[:count]) + spec.eps
        added = parts[:, count : 2 * count] * scales[1] + bases[count : 2 * count]
        added = spec.added * torch.sigmoid(added) + spec.added_eps
        if not spec.iterations:
            return read, added, None
        mixture = parts[:, 2 * count :] * scales[2] + bases[2 * count :]
        mixture = torch.softmax(mixture.unflatten(-1, (count, count)), dim=-1) + spec.eps
        return read, added, balance(mixture, spec)

    @staticmethod
    def leave(
        states: HyperStates,
        found: torch.Tensor | ExpertParts,
        post: torch.Tensor,
        mixture: Mixture,
        following: HyperWeights | None,
    ) -> HyperStates:
        """Return the states after a part, whose result is `found` [T, hidden], or its parts.

        `following`: what computes the weights of the next part, or at the end; None: nothing does.
        """
        streams = states.streams
        if _in_kernels(streams):
            from tgi_trio.shard.torch_backend.layers.streams import hyper_kernels  # imports Triton

            return HyperStates(*hyper_kernels.write(streams, found, post, mixture, following))
        if isinstance(found, ExpertParts):
            found = found.combine()
        if mixture is None:
            added = post.unsqueeze(-1) * found.float().unsqueeze(-2)
            return HyperStates((added + streams.float()).to(streams.dtype))
        kept = torch.matmul(mixture.to(streams.dtype).transpose(-1, -2), streams)
        return HyperStates(post.to(streams.dtype).unsqueeze(-1) * found.unsqueeze(-2) + kept)

    def nbytes(self) -> int:
        return self.weights.nbytes()


@dataclass(frozen=True, slots=True, eq=False)
class LayerHyper:
    """The hyper-connections of a layer."""

    attention: HyperConnection
    mlp: HyperConnection

    def pack(self) -> None:
        """Do nothing: the weights are small."""

    def nbytes(self) -> int:
        return self.attention.nbytes() + self.mlp.nbytes()


@dataclass(frozen=True, slots=True, eq=False)
class HyperEnds:
    """What makes streams of the embedding, and the last hidden state of streams."""

    spec: HyperSpec
    weights: HyperWeights | None  # None: the last hidden state is the mean of all
    invariant: bool = False  # see `batch_invariance.py`

    def split(self, x: torch.Tensor) -> HyperStates:
        """Return the states of `x` [T, hidden], which is each of them."""
        return HyperStates(x.unsqueeze(1).expand(-1, self.spec.count, -1).contiguous())

    def join(self, states: HyperStates) -> torch.Tensor:
        """Return the weighted sum [T, hidden] of the states."""
        own, (streams, mixed) = self.weights, states
        if own is None:
            return _average(streams) if self.invariant else streams.mean(dim=1)
        if mixed is not None:
            from tgi_trio.shard.torch_backend.layers.streams import hyper_kernels  # imports Triton

            return hyper_kernels.read(self.spec, own, streams, mixed, adds=False)[0]
        pre = torch.sigmoid(own.of(streams) * own.scale + own.base) + self.spec.eps
        return _add_up(pre, streams)

    def nbytes(self) -> int:
        return 0 if self.weights is None else self.weights.nbytes()


def balance(mixture: torch.Tensor, spec: HyperSpec) -> torch.Tensor:
    """Return `mixture` [T, count, count] with rows and columns that add up to one (Sinkhorn)."""
    mixture = mixture / (mixture.sum(dim=-2, keepdim=True) + spec.eps)
    for _ in range(spec.iterations - 1):
        mixture = mixture / (mixture.sum(dim=-1, keepdim=True) + spec.eps)
        mixture = mixture / (mixture.sum(dim=-2, keepdim=True) + spec.eps)
    return mixture


def _add_up(weights: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
    return (weights.unsqueeze(-1) * streams).sum(dim=1).to(streams.dtype)


def _average(streams: torch.Tensor) -> torch.Tensor:
    """Return the mean [T, hidden] of `streams` [T, count, hidden], added up in their order."""
    total, *others = streams.float().unbind(dim=1)
    for each in others:
        total = total + each
    return (total / streams.shape[1]).to(streams.dtype)


def holds_state(size: int) -> bool:
    """Return whether the kernels hold hidden states of `size` numbers."""
    return size <= _MOST


def _in_kernels(streams: torch.Tensor) -> bool:
    return runs_kernels(streams.device) and holds_state(streams.shape[-1])
