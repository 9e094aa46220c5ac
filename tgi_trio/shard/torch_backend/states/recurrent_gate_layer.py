"""The layer of a `RecurrentGate`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import torch

from tgi_trio.shard.torch_backend.layers.activation import Activation
from tgi_trio.shard.torch_backend.layers.linear import Linear
from tgi_trio.shard.torch_backend.states.convolution import CausalConvolution
from tgi_trio.shard.torch_backend.states.recurrent_gate import scan_gated
from tgi_trio.shard.torch_backend.states.steps import StateSteps

_SHARPNESS: Final = 8.0  # Griffin's constant c, which multiplies the decay's logarithm


class HeadGate(NamedTuple):
    """The sigmoid of a linear layer per head. Float32."""

    weight: torch.Tensor  # [heads, head_dim, head_dim], inputs first
    bias: torch.Tensor  # [heads, head_dim]

    def open(self, x: torch.Tensor) -> torch.Tensor:
        """Return numbers from 0 to 1, [T, heads * head_dim], for `x` of the same shape."""
        heads = x.unflatten(-1, self.bias.shape).transpose(0, 1)
        made = torch.baddbmm(self.bias[:, None], heads, self.weight)
        return made.transpose(0, 1).flatten(1).sigmoid()


class RecurrentGateLayer:
    """Griffin's recurrent block; a `MixerLayer`."""

    def __init__(
        self,
        *,
        inner: Linear,
        activation: Activation,
        convolution: CausalConvolution,
        entry: HeadGate,
        decay: HeadGate,
        rate: torch.Tensor,
        output: Linear,
    ) -> None:
        """Hold this rank's heads; see `RecurrentGateRefs`. `rate` float32 [width], above 0."""
        self.inner = inner
        self.activation = activation
        self.convolution = convolution
        self.entry = entry
        self.decay = decay
        self.rate = rate
        self.output = output

    def mix(
        self, x: torch.Tensor, states: Mapping[str, torch.Tensor], steps: StateSteps
    ) -> torch.Tensor:
        beside, own = self.inner(x).chunk(2, dim=-1)
        own = self.convolution(own, states["tail"], steps).float()
        logarithm = -_SHARPNESS * self.decay.open(own) * self.rate
        # The input is scaled by sqrt(1 - a^2), so that the state remains as large as the input
        # however slowly it decays; a sequence's first token, which finds no state, is not scaled.
        share = (1 - torch.exp(2 * logarithm)).sqrt_()
        share = share.masked_fill_(steps.begins()[:, None], 1)
        read, after = scan_gated(
            own * self.entry.open(own) * share,
            logarithm.exp(),
            steps.read(states["recurrence"]),
            steps,
        )
        steps.write(states["recurrence"], after)
        return self.output(read.to(x.dtype) * self.activation(beside))

    @property
    def in_turns(self) -> bool:
        return True

    def pack(self) -> None:
        self.inner.pack()
        self.output.pack()

    def nbytes(self) -> int:
        parts = (self.inner, self.convolution, self.output)
        plain = (*self.entry, *self.decay, self.rate)
        return sum(part.nbytes() for part in parts) + sum(each.nbytes for each in plain)
