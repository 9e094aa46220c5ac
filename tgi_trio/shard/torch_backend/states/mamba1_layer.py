"""The layer of a `Mamba1`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.nn import functional

from tgi_trio.model.specs.mixers import Mamba1
from tgi_trio.shard.torch_backend.layers.linear import Linear
from tgi_trio.shard.torch_backend.layers.vocabulary import Gathering
from tgi_trio.shard.torch_backend.states.convolution import CausalConvolution
from tgi_trio.shard.torch_backend.states.mamba1 import scan_mamba1
from tgi_trio.shard.torch_backend.states.steps import StateSteps


class Mamba1Layer:
    """Mamba's selective state space model; a `MixerLayer`."""

    def __init__(
        self,
        mixer: Mamba1,
        *,
        inner: Linear,
        convolution: CausalConvolution,
        selection: Linear,
        norms: list[torch.Tensor],
        step: Linear,
        step_bias: torch.Tensor,
        rate: torch.Tensor,
        skip: torch.Tensor,
        output: Linear,
        ranks: Gathering | None,
    ) -> None:
        """Hold this rank's channels; see `Mamba1Refs` for the linears and `norms`.

        Float32: `step_bias` and `skip` [channels]; `rate` [state_dim, channels], negative. The
        output of `selection` is a partial sum over `ranks`; None: there is only one.
        """
        self.mixer = mixer
        self.inner = inner
        self.convolution = convolution
        self.selection = selection
        self.norms = norms
        self.step = step
        self.step_bias = step_bias
        self.rate = rate
        self.skip = skip
        self.output = output
        self._ranks = ranks
        self._parts = (mixer.step_rank, mixer.state_dim, mixer.state_dim)

    def mix(
        self, x: torch.Tensor, states: Mapping[str, torch.Tensor], steps: StateSteps
    ) -> torch.Tensor:
        mixed, gate = self.inner(x).chunk(2, dim=-1)
        mixed = functional.silu(self.convolution(mixed, states["tail"], steps))
        step, b, c = self._select(mixed)
        own = mixed.float()
        read, after = scan_mamba1(
            own,
            functional.softplus(self.step(step).float() + self.step_bias),
            self.rate,
            b.float(),
            c.float(),
            steps.read(states["recurrence"]),
            steps,
        )
        steps.write(states["recurrence"], after)
        read = (read + self.skip * own) * functional.silu(gate.float())
        return self.output(read.to(x.dtype))

    def _select(self, mixed: torch.Tensor) -> list[torch.Tensor]:
        """Return the low-rank time steps [T, step_rank], and b and c [T, state_dim]."""
        selected = self.selection(mixed)
        if self._ranks is not None:
            selected = self._ranks.all_reduce(selected)
        parts = list(selected.split(self._parts, dim=-1))
        if self.mixer.norm == "none":
            return parts
        gains: Sequence[torch.Tensor | None] = self.norms or [None] * len(parts)
        return [
            functional.rms_norm(part, part.shape[-1:], gain, self.mixer.norm_eps)
            for part, gain in zip(parts, gains, strict=True)
        ]

    @property
    def in_turns(self) -> bool:
        return True

    def pack(self) -> None:
        for linear in (self.inner, self.selection, self.step, self.output):
            linear.pack()

    def nbytes(self) -> int:
        parts = (self.inner, self.convolution, self.selection, self.step, self.output)
        plain = (*self.norms, self.step_bias, self.rate, self.skip)
        return sum(part.nbytes() for part in parts) + sum(each.nbytes for each in plain)
