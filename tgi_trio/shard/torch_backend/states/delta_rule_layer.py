"""The layer of a `DeltaRule`; on a device, what is between its products is few launches."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional

from tgi_trio.model.specs.mixers import DeltaRule
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.states.convolution import CausalConvolution
from tgi_trio.shard.torch_backend.states.delta_rule import apply_delta_rule, normalise
from tgi_trio.shard.torch_backend.states.delta_rule_kernels import DeltaRuleKernels, Projected
from tgi_trio.shard.torch_backend.states.steps import StateSteps
from tgi_trio.shard.torch_backend.torch_device import runs_kernels


class DeltaRuleLayer:
    """Linear attention by the gated delta rule; a `MixerLayer`."""

    def __init__(
        self,
        mixer: DeltaRule,
        *,
        inner: Linear,
        decay_up: Linear | None,
        gate_up: Linear | None,
        convolution: CausalConvolution,
        rate: torch.Tensor,
        decay_bias: torch.Tensor,
        norm: torch.Tensor,
        output: Linear,
        invariant: bool = False,
    ) -> None:
        """Hold this rank's heads; see `DeltaRuleRefs` for the linears.

        `invariant`: rows are moved token by token; see `batch_invariance.py`.

        `rate`, `decay_bias`: float32 [value_heads, 1] and [value_heads, 1 or key_dim]; the
        logarithm of a token's decay is -rate * softplus(decay + decay_bias), or, with a bound,
        least_decay * sigmoid(rate * (decay + decay_bias)).
        """
        self.mixer = mixer
        self.inner = inner
        self.decay_up = decay_up
        self.gate_up = gate_up
        self.convolution = convolution
        self.rate = rate
        self.decay_bias = decay_bias
        self.norm = norm
        self.output = output
        values = len(rate)
        channels = convolution.channels
        keys = (channels - values * mixer.value_dim) // 2
        self._parts = (keys, keys, values * mixer.value_dim)
        rank = mixer.channel_rank
        whole = (values * mixer.value_dim, values, decay_bias.numel())
        others = (rank, rank, values) if rank else whole
        self._projected = (channels, *others)
        self._kernels = DeltaRuleKernels(
            mixer, keys // mixer.key_dim, rate, decay_bias, invariant=invariant
        )
        self._each = values * mixer.key_dim // keys  # value heads that share a key head

    def mix(
        self, projected: torch.Tensor, states: Mapping[str, torch.Tensor], steps: StateSteps
    ) -> torch.Tensor:
        mixer = self.mixer
        mixed, *others = projected.split(self._projected, dim=-1)
        if self.decay_up is not None and self.gate_up is not None:
            decay, gate, beta = others
            decay, gate = self.decay_up(decay), self.gate_up(gate)
        else:
            gate, beta, decay = others
        mixed = self.convolution(mixed, states["tail"], steps, silu=True, dtype=torch.float32)
        if runs_kernels(projected.device) and self._kernels.fit:
            own = Projected(mixed, gate, beta, decay)
            return self.output(self._kernels.launch(own, self.norm, states["recurrence"], steps))
        query, key, value = mixed.split(self._parts, dim=-1)
        decay = decay.float().view(len(projected), *self.decay_bias.shape)
        read, after = apply_delta_rule(
            self._spread(normalise(query.unflatten(-1, (-1, mixer.key_dim))) * mixer.key_dim**-0.5),
            self._spread(normalise(key.unflatten(-1, (-1, mixer.key_dim)))),
            value.unflatten(-1, (-1, mixer.value_dim)),
            self._decays(decay + self.decay_bias),
            beta.float().sigmoid() * mixer.beta_scale,
            steps.read(states["recurrence"]),
            steps,
        )
        steps.write(states["recurrence"], after)
        normed = functional.rms_norm(read, (mixer.value_dim,), self.norm, mixer.norm_eps)
        gate = gate.float().view(read.shape)
        opened = functional.silu(gate) if mixer.gate == "silu" else gate.sigmoid()
        return self.output((normed * opened).flatten(1).to(projected.dtype))

    def _decays(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logarithms of decays."""
        if self.mixer.least_decay:
            return self.mixer.least_decay * torch.sigmoid(self.rate * x)
        return -self.rate * functional.softplus(x)

    def _spread(self, heads: torch.Tensor) -> torch.Tensor:
        """Return `heads` [T, key heads, key_dim], repeated for the value heads that share them."""
        if self.mixer.tiled:
            return heads.repeat(1, self._each, 1)
        return heads if self._each == 1 else heads.repeat_interleave(self._each, 1)

    @property
    def in_turns(self) -> bool:
        return not self._kernels.fit

    def pack(self) -> None:
        for linear in (self.inner, self.decay_up, self.gate_up, self.output):
            if linear is not None:
                linear.pack()

    def nbytes(self) -> int:
        parts = (self.inner, self.decay_up, self.gate_up, self.convolution, self.output)
        plain = (self.rate, self.decay_bias, self.norm)
        return sum(part.nbytes() for part in parts if part) + sum(each.nbytes for each in plain)
