"""The layer of a `Mamba2`; on a device, three launches between its products, or two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import torch
from torch.nn import functional

from tgi_trio.model.specs.mixers import Mamba2
from tgi_trio.shard.torch_backend.attention.paged.tiles import pad_dim
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.layers.residual import count_warps
from tgi_trio.shard.torch_backend.layers.vocabulary import Gathering
from tgi_trio.shard.torch_backend.states.convolution import CausalConvolution, PendingConvolution
from tgi_trio.shard.torch_backend.states.mamba2 import scan_mamba2
from tgi_trio.shard.torch_backend.states.recurrences import choose_precision
from tgi_trio.shard.torch_backend.states.steps import StateSteps
from tgi_trio.shard.torch_backend.states.walking import WARPS, count_walked, list_walked
from tgi_trio.shard.torch_backend.torch_device import runs_kernels

_STEPPED: Final = 1 << 13  # numbers of a state that a program holds, for decodes
_MOST_STATE: Final = 256  # numbers that a program of a prompt has room for
_MOST_GROUP: Final = 1 << 15  # numbers that a program normalises


def count_stepped(state: int, head_dim: int) -> int:
    """Return the numbers of a head that a program computes, for decodes."""
    return min(_STEPPED // state, pad_dim(head_dim))


class ScanTile(NamedTuple):
    """How a program goes through a prompt."""

    tokens: int  # of a chunk
    numbers: int  # of a head that it computes
    state: int  # numbers of a state for each of them that are multiplied at a time
    warps: int
    stages: int
    precision: str


def choose_scan_tile(state: int, dtype: torch.dtype) -> ScanTile:
    """Return the tile for states of so many numbers for each of a head, in a model of a dtype.

    Float32 takes three products for one, and registers for as many.
    """
    precision = choose_precision(dtype)
    if dtype is torch.float32:
        return ScanTile(16, 16, 32 if state > 128 else 64, 4, 2, precision)
    tokens, warps = (16, 8) if state > 128 else (32, 4)
    return ScanTile(tokens, 32, 128, warps, 3, precision)


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
        invariant: bool = False,
    ) -> None:
        """Hold this rank's heads; see `Mamba2Refs` for the linears.

        `invariant`: rows are moved token by token; see `batch_invariance.py`.

        The layer owns `convolution`, which takes the factors of its inputs.
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
        self.invariant = invariant
        heads, width = len(rate), len(rate) * mixer.head_dim
        shared = (convolution.channels - width) // 2
        self._parts = (width, shared, shared)
        self._projected = (width, convolution.channels, heads)
        self._groups = shared // mixer.state_dim
        # Needed if groups are spread over ranks; None: each group is whole here.
        self._ranks = ranks if ranks is not None and mixer.groups < ranks.size else None
        self._gate_factor, *factors, self._dt_factor = mixer.multipliers or (1.0,) * 5
        if mixer.multipliers:
            convolution.scale_inputs(factors, self._parts)

    def mix(
        self, projected: torch.Tensor, states: Mapping[str, torch.Tensor], steps: StateSteps
    ) -> torch.Tensor:
        begun = self.begin(projected, states, steps)
        begun.compute()
        return self.go_on(projected, begun.found, states, steps)

    def begin(
        self, projected: torch.Tensor, states: Mapping[str, torch.Tensor], steps: StateSteps
    ) -> PendingConvolution:
        """Return the convolution with which `mix` begins, yet to be computed."""
        mixed = projected.split(self._projected, dim=-1)[1]
        return PendingConvolution(self.convolution, mixed, states["tail"], steps, silu=True)

    def go_on(
        self,
        projected: torch.Tensor,
        mixed: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        steps: StateSteps,
    ) -> torch.Tensor:
        """Do what `mix` does, behind the convolution that it begins with: `mixed` [T, channels]."""
        gate, _, dt = projected.split(self._projected, dim=-1)
        recurrence = states["recurrence"]
        if self.in_turns:
            dt = dt.float() * self._dt_factor
            opened = self._finish(self._scan(mixed.float(), dt, recurrence, steps), gate)
        else:
            opened = self._launch(mixed, gate, dt, recurrence, steps)
            if self.norm is not None:
                opened = self._finish(opened, gate)
        return self.output(opened)

    def _scan(
        self, mixed: torch.Tensor, dt: torch.Tensor, states: torch.Tensor, steps: StateSteps
    ) -> torch.Tensor:
        """Return what tokens read of their states, [T, width]; all is float32.

        `mixed` [T, channels] and `dt` [T, heads]: x, b and c, and time steps before their bias.
        """
        mixer = self.mixer
        own, b, c = mixed.split(self._parts, dim=-1)
        own = own.unflatten(-1, (-1, mixer.head_dim))
        dt = functional.softplus(dt + self.step_bias)
        if mixer.least_step > 0 or mixer.most_step != float("inf"):
            dt = dt.clamp(mixer.least_step, mixer.most_step)
        read, after = scan_mamba2(
            own,
            dt,
            self.rate,
            b.unflatten(-1, (self._groups, -1)),
            c.unflatten(-1, (self._groups, -1)),
            steps.read(states),
            steps,
        )
        steps.write(states, after)
        skipped: torch.Tensor = (read + self.skip[:, None] * own).flatten(1)
        return skipped

    def _launch(
        self,
        mixed: torch.Tensor,
        gate: torch.Tensor,
        dt: torch.Tensor,
        states: torch.Tensor,
        steps: StateSteps,
    ) -> torch.Tensor:
        """Return the same of inputs in the model's dtype; if there is no norm, gated and in it."""
        from tgi_trio.shard.torch_backend.kernels.states import mamba2  # imports Triton

        mixer, rows, heads = self.mixer, len(steps.reads), len(self.rate)
        starts, *slots = steps.slots()
        gated = self.norm is None
        read = steps.new_results(mixed, self._parts[0], mixed.dtype if gated else torch.float32)
        state = pad_dim(mixer.state_dim)
        tile = choose_scan_tile(state, mixed.dtype)
        part = count_stepped(state, mixer.head_dim) if steps.decodes else tile.numbers
        if self.invariant:
            part = count_walked(state, pad_dim(mixer.head_dim))
        constants = {
            **{"HEADS": heads, "GROUPS": self._groups, "DIM": mixer.head_dim, "BLOCK": part},
            **{"STATE": mixer.state_dim, "PADDED_STATE": state, "GATED": gated},
        }
        learned = self.rate, self.step_bias, self.skip
        numbers = (
            *(gate.stride(0), dt.stride(0), self._gate_factor, self._dt_factor),
            *(mixer.least_step, mixer.most_step),
        )
        own = (*learned, states, *slots, *numbers)
        grid = (rows, heads, -(-mixer.head_dim // part))
        if self.invariant:
            from tgi_trio.shard.torch_backend.kernels.states import token_by_token

            token_by_token.walk_mamba2[grid](
                *(read, mixed, gate, dt, *learned, states, *list_walked(steps), *numbers),
                **constants,
                num_warps=WARPS,
            )
        elif steps.decodes:
            mamba2.step_mamba2[grid](read, mixed, gate, dt, *own, **constants)
        else:
            mamba2.scan_mamba2[grid](
                *(read, mixed, gate, dt, starts, *own),
                **constants,
                BLOCK_STATE=min(tile.state, state),
                LENGTH=tile.tokens,
                PRECISION=tile.precision,
                num_warps=tile.warps,
                num_stages=tile.stages,
            )
        return read

    def _finish(self, read: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return what was `read`, float32 [T, width], gated and normalised by group, as `gate`."""
        if self.norm is not None and runs_kernels(read.device) and not self.gathers_norms:
            return self._launch_norm(read, gate, self.norm)
        opened = functional.silu(gate.float() * self._gate_factor)
        if self.norm is None:
            return (read * opened).to(gate.dtype)
        if self.mixer.norm == "behind gate":
            read = read * opened
        normed = self._normalise(read.unflatten(-1, (self._groups, -1))).flatten(1) * self.norm
        return (normed if self.mixer.norm == "behind gate" else normed * opened).to(gate.dtype)

    def _launch_norm(
        self, read: torch.Tensor, gate: torch.Tensor, norm: torch.Tensor
    ) -> torch.Tensor:
        from tgi_trio.shard.torch_backend.kernels.states import mamba2  # imports Triton

        size = self._parts[0] // self._groups
        out, padded = torch.empty_like(gate, memory_format=torch.contiguous_format), pad_dim(size)
        mamba2.finish_mamba2[(len(read), self._groups)](
            *(out, read, gate, norm, gate.stride(0), self._gate_factor, self.mixer.norm_eps),
            GROUPS=self._groups,
            SIZE=size,
            PADDED=padded,
            BEFORE=self.mixer.norm == "before gate",
            num_warps=count_warps(padded),
        )
        return out

    @property
    def gathers_norms(self) -> bool:
        """Whether torch normalises on devices, too: groups are on several ranks, or very large."""
        spread = self._ranks is not None or self._parts[0] // self._groups > _MOST_GROUP
        return self.norm is not None and spread

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
        in_kernels = runs_kernels(self.rate.device)
        return not in_kernels or pad_dim(self.mixer.state_dim) > _MOST_STATE

    def pack(self) -> None:
        self.inner.pack()
        self.output.pack()

    def nbytes(self) -> int:
        parts = (self.inner, self.convolution, self.output)
        plain = [self.rate, self.step_bias, self.skip, *([] if self.norm is None else [self.norm])]
        return sum(part.nbytes() for part in parts) + sum(each.nbytes for each in plain)
