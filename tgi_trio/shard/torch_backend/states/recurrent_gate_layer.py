"""The layer of a `RecurrentGate`; on a device, three launches beside its products, or two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch

from tgi_trio.shard.torch_backend.batch_invariance import apparent_rows
from tgi_trio.shard.torch_backend.layers.activation import Activation
from tgi_trio.shard.torch_backend.layers.gating import name_activation
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.states.convolution import CausalConvolution
from tgi_trio.shard.torch_backend.states.recurrences import choose_precision
from tgi_trio.shard.torch_backend.states.recurrent_gate import scan_gated
from tgi_trio.shard.torch_backend.states.steps import StateSteps
from tgi_trio.shard.torch_backend.states.walking import CHANNELS as WALKED
from tgi_trio.shard.torch_backend.states.walking import WARPS, list_walked
from tgi_trio.shard.torch_backend.torch_device import runs_kernels

_SHARPNESS: Final = 8.0  # Griffin's constant c, which multiplies the decay's logarithm
FEW: Final = 16  # tokens whose gates a program computes, as tensor cores multiply no fewer
MANY: Final = 64
PART: Final = 32  # channels of a program that computes gates
INPUTS: Final = 32  # that it multiplies at a time
CHANNELS: Final = 32  # of a program that goes through a row
LENGTH: Final = 64  # tokens of a chunk


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
        invariant: bool = False,
    ) -> None:
        """Hold this rank's heads; see `RecurrentGateRefs`. `rate` float32 [width], above 0.

        `invariant`: rows are moved token by token; see `batch_invariance.py`.
        """
        self.inner = inner
        self.activation = activation
        self._act = name_activation(activation)
        self.convolution = convolution
        self.entry = entry
        self.decay = decay
        self._slowest = -_SHARPNESS * rate  # a decay's logarithm where its gate is wide open
        self.output = output
        self.invariant = invariant

    def mix(
        self, projected: torch.Tensor, states: Mapping[str, torch.Tensor], steps: StateSteps
    ) -> torch.Tensor:
        beside, own = projected.chunk(2, dim=-1)
        own = self.convolution(own, states["tail"], steps)
        recurrence = states["recurrence"]
        if not self.in_turns:
            return self.output(self._launch(own, beside, recurrence, steps))
        own = own.float()
        logarithm = self._slowest * self.decay.open(own)
        # The input is scaled by sqrt(1 - a^2), so that the state remains as large as the input
        # however slowly it decays; a sequence's first token, which finds no state, is not scaled.
        share = (1 - torch.exp(2 * logarithm)).sqrt_()
        share = share.masked_fill_(steps.begins()[:, None], 1)
        read, after = scan_gated(
            own * self.entry.open(own) * share, logarithm.exp(), steps.read(recurrence), steps
        )
        steps.write(recurrence, after)
        return self.output(read.to(projected.dtype) * self.activation(beside))

    def _launch(
        self,
        own: torch.Tensor,
        beside: torch.Tensor,
        states: torch.Tensor,
        steps: StateSteps,
    ) -> torch.Tensor:
        """Return the states after all tokens of `own` [T, width], times the other branch."""
        from tgi_trio.shard.torch_backend.kernels.states import recurrent_gate  # imports Triton

        (tokens, width), (heads, dim) = own.shape, self.entry.bias.shape
        many = FEW if apparent_rows(tokens, invariant=self.invariant) <= FEW else MANY
        grid = (-(-tokens // many), heads, -(-dim // PART))
        gates = (own, *self.entry, *self.decay, self._slowest)
        sizes: dict[str, Any] = {
            **{"HEADS": heads, "DIM": dim, "TOKENS": many, "BLOCK": PART, "INPUTS": INPUTS},
            "PRECISION": choose_precision(own.dtype),
        }
        read, (starts, *slots) = steps.new_results(own, width), steps.slots()
        if steps.decodes and not self.invariant:
            recurrent_gate.step_gated[grid](
                *(read, *gates, beside, states, *slots, beside.stride(0), tokens),
                **sizes,
                ACT=self._act,
            )
            return read
        entered, logarithms = (
            torch.empty(own.shape, dtype=torch.float32, device=own.device) for _ in range(2)
        )
        recurrent_gate.open_gates[grid](entered, logarithms, *gates, tokens, **sizes)
        if self.invariant:
            from tgi_trio.shard.torch_backend.kernels.states import token_by_token

            token_by_token.walk_gated[(len(steps.reads), -(-width // WALKED))](
                *(read, entered, logarithms, beside, states, *list_walked(steps)),
                beside.stride(0),
                CHANNELS=width,
                BLOCK=WALKED,
                ACT=self._act,
                num_warps=WARPS,
            )
            return read
        recurrent_gate.scan_gated[(len(steps.reads), -(-width // CHANNELS))](
            *(read, entered, logarithms, beside, starts, states, *slots, beside.stride(0)),
            CHANNELS=width,
            BLOCK=CHANNELS,
            LENGTH=LENGTH,
            ACT=self._act,
        )
        return read

    @property
    def in_turns(self) -> bool:
        return not self._act or not runs_kernels(self._slowest.device)

    def pack(self) -> None:
        self.inner.pack()
        self.output.pack()

    def nbytes(self) -> int:
        parts = (self.inner, self.convolution, self.output)
        plain = (*self.entry, *self.decay, self._slowest)
        return sum(part.nbytes() for part in parts) + sum(each.nbytes for each in plain)
