"""The layer of a `Mamba2`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional

from tgi_trio.model.specs.mixers import Mamba2
from tgi_trio.shard.torch_backend.layers.linear import Linear
from tgi_trio.shard.torch_backend.layers.vocabulary import Gathering
from tgi_trio.shard.torch_backend.states.convolution import CausalConvolution
from tgi_trio.shard.torch_backend.states.mamba2 import scan_mamba2
from tgi_trio.shard.torch_backend.states.steps import StateSteps


class Mamba2Layer:
    """Mamba-2's state space model, with a decay per head; a `MixerLayer`."""

    def __init__(
        self,
        mixer: Mamba2,
        *,
        inner: Linear,
        convolution: CausalConvolution,
        rate: torch.Tensor,
        step_bias: torch.Tensor,
        skip: torch.Tensor,
        norm: torch.Tensor | None,
        output: Linear,
        ranks: Gathering | None,
    ) -> None:
        """Hold this rank's heads; see `Mamba2Refs` for the linears.

        If there are fewer groups than `ranks`, a group's heads are spread over neighbouring ranks.
        Float32: `rate` [heads], negative; `step_bias` and `skip` [heads]; `norm` [heads *
        head_dim].
        """
        self.mixer = mixer
        self.inner = inner
        self.convolution = convolution
        self.rate = rate
        self.step_bias = step_bias
        self.skip = skip
        self.norm = norm
        self.output = output
        heads, width = len(rate), len(rate) * mixer.head_dim
        shared = (convolution.channels - width) // 2
        self._parts = (width, shared, shared)
        self._projected = (width, convolution.channels, heads)
        self._groups = shared // mixer.state_dim
        # Needed if groups are spread over ranks; None: each group is whole here.
        self._ranks = ranks if ranks is not None and mixer.groups < ranks.size else None
        self._scales: torch.Tensor | None = None
        if mixer.multipliers:
            counts = torch.tensor((width, *self._parts, heads))
            each = torch.tensor(mixer.multipliers).repeat_interleave(counts)
            self._scales = each.to(rate.device)

    def mix(
        self, x: torch.Tensor, states: Mapping[str, torch.Tensor], steps: StateSteps
    ) -> torch.Tensor:
        mixer = self.mixer
        projected = self.inner(x)
        if self._scales is not None:
            projected = projected * self._scales.to(x.dtype)
        gate, mixed, step = projected.split(self._projected, dim=-1)
        mixed = functional.silu(self.convolution(mixed, states["tail"], steps)).float()
        own, b, c = mixed.split(self._parts, dim=-1)
        own = own.unflatten(-1, (-1, mixer.head_dim))
        step = functional.softplus(step.float() + self.step_bias)
        if mixer.least_step > 0 or mixer.most_step != float("inf"):
            step = step.clamp(mixer.least_step, mixer.most_step)
        read, after = scan_mamba2(
            own,
            step,
            self.rate,
            b.unflatten(-1, (self._groups, -1)),
            c.unflatten(-1, (self._groups, -1)),
            steps.read(states["recurrence"]),
            steps,
        )
        steps.write(states["recurrence"], after)
        read = (read + self.skip[:, None] * own).flatten(1)
        opened = self._finish(read, functional.silu(gate.float()))
        if mixer.output_multiplier != 1.0:
            return self.output(opened.to(x.dtype)) * mixer.output_multiplier
        return self.output(opened.to(x.dtype))

    def _finish(self, read: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return the scan's output `read` [T, width], gated and normalised by group."""
        if self.norm is None:
            return read * gate
        if self.mixer.norm == "behind gate":
            read = read * gate
        normed = self._normalise(read.unflatten(-1, (self._groups, -1))).flatten(1) * self.norm
        return normed if self.mixer.norm == "behind gate" else normed * gate

    def _normalise(self, groups: torch.Tensor) -> torch.Tensor:
        """Return [T, groups, ...] divided by the root mean square of each group over all ranks."""
        eps, ranks = self.mixer.norm_eps, self._ranks
        if ranks is None:
            return functional.rms_norm(groups, groups.shape[-1:], None, eps)
        squares = ranks.all_gather(groups.square().mean(-1))  # [T, ranks], each of its part
        of_groups = squares.unflatten(-1, (self.mixer.groups, -1)).mean(-1)
        own = of_groups[:, ranks.rank * self.mixer.groups // ranks.size]
        return groups * torch.rsqrt(own + eps)[:, None, None]

    @property
    def in_turns(self) -> bool:
        return True

    def pack(self) -> None:
        self.inner.pack()
        self.output.pack()

    def nbytes(self) -> int:
        parts = (self.inner, self.convolution, self.output)
        plain = [self.rate, self.step_bias, self.skip, *([] if self.norm is None else [self.norm])]
        return sum(part.nbytes() for part in parts) + sum(each.nbytes for each in plain)
