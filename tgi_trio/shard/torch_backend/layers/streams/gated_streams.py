"""Several hidden states of a token, gated before each part of a layer; see `GatedStreamsSpec`.

On a device, what lies between two products is one launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch.nn import functional

from tgi_trio.model.specs.decoder import NormKind
from tgi_trio.shard.torch_backend.layers.expert_parts import ExpertParts
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.layers.opening import (
    compile_narrow,
    open_narrow,
    opens_narrow,
)
from tgi_trio.shard.torch_backend.layers.residual import count_warps
from tgi_trio.shard.torch_backend.layers.streams.hyper_connections import holds_state
from tgi_trio.shard.torch_backend.padding import next_power_of_2
from tgi_trio.shard.torch_backend.torch_device import runs_kernels

_BLOCK: Final = 1024  # numbers of a token that a program mixes
_FEW: Final = 128  # tokens whose experts are summed anew for each hidden state, beside the others


class StreamNorm:
    """Normalises each of a token's hidden states by itself, with weights of its own."""

    def __init__(self, kind: NormKind, weight: torch.Tensor, eps: float, count: int) -> None:
        """`kind`: one of RMSNorm; `weight` [count * hidden]."""
        self.weight = weight.float() + (1.0 if kind == "rms_plus_one" else 0.0)
        self.eps = eps
        self.count = count

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` [T, count * hidden], normalised."""
        apart = x.float().unflatten(-1, (self.count, -1))
        normed = functional.rms_norm(apart, apart.shape[-1:], None, self.eps).flatten(-2)
        return (normed * self.weight).to(x.dtype)

    def nbytes(self) -> int:
        return self.weight.nbytes


class LayerOutput(NamedTuple):
    """What a part of a layer said, which is to be added to every hidden state."""

    output: torch.Tensor | ExpertParts  # [T, hidden], or the parts of which it is the sum
    factors: torch.Tensor  # [T, count], before their activation


class MixedStreams(NamedTuple):
    """What a part of a layer reads."""

    streams: torch.Tensor  # [T, count * hidden]: all hidden states
    mixed: torch.Tensor  # [T, hidden]: what is read of them
    factors: torch.Tensor  # [T, count], for `LayerOutput`; [T, 0] where nothing will be added


@dataclass(frozen=True, slots=True, eq=False)
class StreamGates:
    """The gates before attention or MLP of a layer, or before the head."""

    count: int
    rank: int
    norm: StreamNorm
    inner: Linear
    gates: Linear

    def read(self, streams: torch.Tensor, addend: LayerOutput | None) -> MixedStreams:
        """Add `addend` to hidden states [T, count * hidden], and mix them by gates."""
        if not _in_kernels(streams, self.count):
            return self._read_apart(streams, addend)
        streams, normed = _launch_addition(streams, addend, self.count, self.norm)
        inner = self.inner(normed)
        narrow, factors = inner[:, : self.rank], inner[:, self.rank :]
        if opens_narrow(self.gates, streams.device):
            mixed = open_narrow(normed, narrow, self.gates, count=self.count, rounds=True)
        else:
            mixed = self._mix(normed, narrow)
        return MixedStreams(streams, mixed, factors)

    def _mix(self, normed: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
        """Do what `open_narrow` does where gates are multiplied by themselves."""
        from tgi_trio.shard.torch_backend.kernels.streams import gated_streams  # imports Triton

        tokens, width = len(inner), normed.shape[1] // self.count
        narrow = torch.empty((tokens, self.rank), dtype=inner.dtype, device=inner.device)
        gated_streams.activate_narrow[(tokens,)](
            narrow,
            inner,
            inner.stride(0),
            RANK=self.rank,
            PADDED=next_power_of_2(self.rank),
            COUNT=self.count,
        )
        gates = self.gates(narrow)
        mixed = torch.empty((tokens, width), dtype=normed.dtype, device=normed.device)
        gated_streams.mix_streams[(tokens, -(-width // _BLOCK))](
            mixed, gates, normed, SIZE=width, BLOCK=_BLOCK, COUNT=self.count
        )
        return mixed

    def _read_apart(self, streams: torch.Tensor, addend: LayerOutput | None) -> MixedStreams:
        """Do what `read` does by torch's operations."""
        streams = add_said(streams, addend, self.count)
        normed = self.norm(streams)
        narrow, factors = self.inner(normed).tensor_split((self.rank,), dim=-1)
        opened = self.gates(functional.silu(narrow / self.count)).sigmoid()
        mixed = (opened * normed).unflatten(-1, (self.count, -1)).mean(dim=-2)
        return MixedStreams(streams, mixed, factors)

    def pack(self) -> None:
        self.inner.pack()
        self.gates.pack()
        if opens_narrow(self.gates, self.norm.weight.device):
            one = self.gates.weight.new_zeros(1, len(self.norm.weight))
            stride = self.inner(one).shape[1]
            compile_narrow(self.gates, stride, count=self.count, rounds=True)

    def nbytes(self) -> int:
        return self.norm.nbytes() + self.inner.nbytes() + self.gates.nbytes()


def add_said(streams: torch.Tensor, addend: LayerOutput | None, count: int) -> torch.Tensor:
    """Return hidden states [T, count * hidden] to which `addend` has been added."""
    if addend is None:
        return streams
    if _in_kernels(streams, count):
        return _launch_addition(streams, addend, count, None)[0]
    output, factors = addend.output, 2.0 * torch.sigmoid(addend.factors / count)
    output = output.combine() if isinstance(output, ExpertParts) else output
    return streams + (output.unsqueeze(-2) * factors.unsqueeze(-1)).flatten(-2)


def _in_kernels(streams: torch.Tensor, count: int) -> bool:
    return runs_kernels(streams.device) and holds_state(streams.shape[1] // count)


def _launch_addition(
    streams: torch.Tensor, addend: LayerOutput | None, count: int, norm: StreamNorm | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum and its norm, [T, count * hidden] each; without a norm, the sum twice."""
    from tgi_trio.shard.torch_backend.kernels.streams import gated_streams  # imports Triton

    output, factors = (streams, streams) if addend is None else addend
    summed = streams if addend is None else torch.empty_like(streams)
    normed = summed if norm is None else torch.empty_like(streams)
    size = streams.shape[1] // count
    padded = next_power_of_2(size)
    read, kind = ExpertParts.describe(output)
    each = count_streams(len(streams), count, sums=isinstance(output, ExpertParts))
    gated_streams.add_to_streams[(len(streams), count // each)](
        normed,
        summed,
        streams,
        *read,
        factors,
        streams if norm is None else norm.weight,
        0.0 if norm is None else norm.eps,
        factors.stride(0),
        SIZE=size,
        PADDED=padded,
        COUNT=count,
        ADDS=addend is not None,
        NORMS=norm is not None,
        EACH=each,
        **kind,
        num_warps=count_warps(padded),
    )
    return summed, normed


def count_streams(tokens: int, count: int, *, sums: bool) -> int:
    """Return how many of a token's `count` hidden states a program adds to.

    One, unless there are many tokens whose experts it `sums`: then all, so that it does so once.
    """
    return count if sums and tokens > _FEW else 1


@dataclass(frozen=True, slots=True, eq=False)
class LayerGates:
    """The gates of a layer."""

    attention: StreamGates
    mlp: StreamGates

    def pack(self) -> None:
        self.attention.pack()
        self.mlp.pack()

    def nbytes(self) -> int:
        return self.attention.nbytes() + self.mlp.nbytes()
