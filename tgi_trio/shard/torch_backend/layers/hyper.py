"""Several hidden states of a token, mixed around attention and MLP: hyper-connections.

Sources: Xie and others 2026 (manifold-constrained hyper-connections); transformers' DeepSeek V4
and, without a mixture, Hunyuan 4.
Weights are computed in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from tgi_trio.model.spec import HyperSpec
from tgi_trio.shard.torch_backend.torch_device import runs_kernels

Mixture = torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class HyperWeights:
    """Computes the weights of a token's hidden states from all of them."""

    mix: torch.Tensor  # float32 [weights, count * hidden], as are all
    base: torch.Tensor  # [weights]
    scale: torch.Tensor  # [kinds of weights]
    eps: float  # of the norm before the mixture

    def of(self, streams: torch.Tensor) -> torch.Tensor:
        """Return the weights [T, weights] of `streams` [T, count, hidden], not scaled yet."""
        flat = streams.flatten(1).float()
        flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.eps)
        return functional.linear(flat, self.mix)

    def nbytes(self) -> int:
        return self.mix.nbytes + self.base.nbytes + self.scale.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class HyperConnection:
    """The hyper-connection around a layer's attention, or around its MLP."""

    spec: HyperSpec
    weights: HyperWeights

    def enter(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Mixture]:
        """Return what the part reads of `streams` [T, count, hidden], and what `leave` needs.

        That is [T, hidden]; the weights [T, count] of the part's result in each stream; and the
        mixture [T, count, count], to each stream (last) from each, None: of each stream alone.
        """
        parts = self.weights.of(streams)
        weigh = self._launch if runs_kernels(parts.device) else self._weigh
        read, added, mixture = weigh(parts)
        return _add_up(read, streams), added, mixture

    def _weigh(self, parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Mixture]:
        """Return the weights of what is read, of the result, and of streams in streams."""
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

    def _launch(self, parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Mixture]:
        """Compute `_weigh` in one launch, where that is some hundred."""
        from tgi_trio.shard.torch_backend.kernels.streams import weigh_streams  # imports Triton

        spec, tokens, count = self.spec, len(parts), self.spec.count
        read, added = parts.new_empty((2, tokens, count))
        mixture = parts.new_empty((tokens, count, count)) if spec.iterations else None
        weigh_streams[(tokens,)](
            read,
            added,
            read if mixture is None else mixture,
            parts.contiguous(),
            self.weights.base,
            self.weights.scale,
            spec.eps,
            spec.added,
            spec.added_eps,
            COUNT=count,
            PADDED=1 << (count - 1).bit_length(),
            ITERATIONS=spec.iterations,
            num_warps=1,
        )
        return read, added, mixture

    @staticmethod
    def leave(
        streams: torch.Tensor, found: torch.Tensor, post: torch.Tensor, mixture: Mixture
    ) -> torch.Tensor:
        """Return the streams [T, count, hidden] after a part, whose result is `found`."""
        if mixture is None:
            added = post.unsqueeze(-1) * found.float().unsqueeze(-2)
            return (added + streams.float()).to(streams.dtype)
        kept = torch.matmul(mixture.to(streams.dtype).transpose(-1, -2), streams)
        return post.to(streams.dtype).unsqueeze(-1) * found.unsqueeze(-2) + kept

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

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """Return the streams [T, count, hidden] of `x` [T, hidden], which is each of them."""
        return x.unsqueeze(1).expand(-1, self.spec.count, -1).contiguous()

    def join(self, streams: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum [T, hidden] of `streams` [T, count, hidden]."""
        own = self.weights
        if own is None:
            return streams.mean(dim=1)
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
