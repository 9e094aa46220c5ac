"""The layer of a `ShortConvolution`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.states.convolution import CausalConvolution
from tgi_trio.shard.torch_backend.states.steps import StateSteps


class ShortConvolutionLayer:
    """out(c * convolution(b * x)), see `model/specs/mixers.py`; a `MixerLayer`."""

    def __init__(self, inner: Linear, convolution: CausalConvolution, output: Linear) -> None:
        """`inner`: rows of b, of c, of x."""
        self.inner = inner
        self.convolution = convolution
        self.output = output

    def mix(
        self, projected: torch.Tensor, states: Mapping[str, torch.Tensor], steps: StateSteps
    ) -> torch.Tensor:
        return self.output(self.convolution.apply_gated(projected, states["tail"], steps))

    @property
    def in_turns(self) -> bool:
        return False

    def pack(self) -> None:
        self.inner.pack()
        self.output.pack()

    def nbytes(self) -> int:
        return self.inner.nbytes() + self.convolution.nbytes() + self.output.nbytes()
