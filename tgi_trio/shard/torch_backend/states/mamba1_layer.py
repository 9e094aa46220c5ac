"""The layer of a `Mamba1`; on a device, two launches beside its products, with norms three."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import torch
from torch.nn import functional

from tgi_trio.model.specs.mixers import Mamba1
from tgi_trio.shard.torch_backend.attention.paged.tiles import pad_dim
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.layers.vocabulary import Gathering
from tgi_trio.shard.torch_backend.states.convolution import CausalConvolution
from tgi_trio.shard.torch_backend.states.mamba1 import scan_mamba1
from tgi_trio.shard.torch_backend.states.steps import StateSteps
from tgi_trio.shard.torch_backend.states.walking import CHANNELS, WARPS, list_walked
from tgi_trio.shard.torch_backend.torch_device import runs_kernels

_MOST_STATE: Final = 64  # numbers of a channel's state that a program has room for
_ROOM: Final = 1 << 13  # numbers of the states after all tokens of a chunk


class RowTile(NamedTuple):
    """What a program of a row, which goes through its tokens in chunks, computes at a time."""

    tokens: int  # of a chunk
    channels: int
    warps: int


def choose_tile(state: int, *, decodes: bool) -> RowTile:
    """Return the tile for so many numbers a state of a channel."""
    if decodes:
        return RowTile(1, 128, 4)
    return RowTile(_ROOM // (32 * state), 32, 8)


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
        invariant: bool = False,
    ) -> None:
        """Hold this rank's channels; see `Mamba1Refs` for the linears and `norms`.

        `invariant`: rows are moved token by token; see `batch_invariance.py`.

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
        self.invariant = invariant
        self._ranks = ranks
        self._parts = (mixer.step_rank, mixer.state_dim, mixer.state_dim)
        self._gains = torch.cat(norms) if norms else None

    def mix(
        self, projected: torch.Tensor, states: Mapping[str, torch.Tensor], steps: StateSteps
    ) -> torch.Tensor:
        mixed, gate = projected.chunk(2, dim=-1)
        mixed = self.convolution(mixed, states["tail"], steps, silu=True)
        dt, selected = self._select(mixed)
        dt = self.step(dt)
        recurrence = states["recurrence"]
        if not self.in_turns:
            return self.output(self._launch(mixed, gate, dt, selected, recurrence, steps))
        own = mixed.float()
        b, c = selected.float().chunk(2, dim=-1)
        dt = functional.softplus(dt.float() + self.step_bias)
        read, after = scan_mamba1(own, dt, self.rate, b, c, steps.read(recurrence), steps)
        steps.write(recurrence, after)
        read = (read + self.skip * own) * functional.silu(gate.float())
        return self.output(read.to(projected.dtype))

    def _launch(
        self,
        mixed: torch.Tensor,
        gate: torch.Tensor,
        dt: torch.Tensor,
        selected: torch.Tensor,
        states: torch.Tensor,
        steps: StateSteps,
    ) -> torch.Tensor:
        """Return what tokens read of their states, gated, in the dtype of `mixed` [T, channels]."""
        from tgi_trio.shard.torch_backend.kernels.states import mamba1  # imports Triton

        channels, state = mixed.shape[1], pad_dim(self.mixer.state_dim)
        sizes = {"CHANNELS": channels, "STATE": self.mixer.state_dim, "PADDED_STATE": state}
        learned = self.rate, self.step_bias, self.skip
        strides = gate.stride(0), dt.stride(0), selected.stride(0)
        read, (starts, *slots) = steps.new_results(mixed, channels), steps.slots()
        if self.invariant:
            from tgi_trio.shard.torch_backend.kernels.states import token_by_token

            token_by_token.walk_mamba1[(len(steps.reads), -(-channels // CHANNELS))](
                *(read, mixed, gate, dt, selected, *learned),
                *(states, *list_walked(steps), *strides),
                **sizes,
                BLOCK=CHANNELS,
                num_warps=WARPS,
            )
            return read
        tile = choose_tile(state, decodes=steps.decodes)
        mamba1.scan_mamba1[(len(steps.reads), -(-channels // tile.channels))](
            *(read, mixed, gate, dt, selected, starts, *learned, states, *slots, *strides),
            **sizes,
            BLOCK=tile.channels,
            LENGTH=tile.tokens,
            DECODES=steps.decodes,
            num_warps=tile.warps,
        )
        return read

    def _select(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the low-rank time steps [T, step_rank], and b beside c [T, 2 * state_dim]."""
        selected = self.selection(mixed)
        if self._ranks is not None:
            selected = self._ranks.all_reduce(selected)
        if self.mixer.norm != "none":
            selected = self._normalise(selected)
        dt, shared = selected.split((self._parts[0], sum(self._parts[1:])), dim=-1)
        return dt, shared

    def _normalise(self, selected: torch.Tensor) -> torch.Tensor:
        """Return all three parts of [T, step_rank + 2 * state_dim], normalised."""
        if runs_kernels(selected.device):
            return self._launch_norms(selected)
        gains: Sequence[torch.Tensor | None] = self.norms or [None] * len(self._parts)
        parts = [
            functional.rms_norm(part, part.shape[-1:], gain, self.mixer.norm_eps)
            for part, gain in zip(selected.split(self._parts, dim=-1), gains, strict=True)
        ]
        return torch.cat(parts, dim=-1)

    def _launch_norms(self, selected: torch.Tensor) -> torch.Tensor:
        from tgi_trio.shard.torch_backend.kernels.states import mamba1  # imports Triton

        rank, state, _ = self._parts
        out = torch.empty_like(selected)
        mamba1.normalise_selected[(len(selected),)](
            *(out, selected, selected if self._gains is None else self._gains),
            self.mixer.norm_eps,
            RANK=rank,
            PADDED_RANK=pad_dim(rank),
            STATE=state,
            PADDED_STATE=pad_dim(state),
            HAS_GAINS=self._gains is not None,
            num_warps=1,
        )
        return out

    @property
    def in_turns(self) -> bool:
        return not runs_kernels(self.rate.device) or pad_dim(self.mixer.state_dim) > _MOST_STATE

    def pack(self) -> None:
        for linear in (self.inner, self.selection, self.step, self.output):
            linear.pack()

    def nbytes(self) -> int:
        parts = (self.inner, self.convolution, self.selection, self.step, self.output)
        plain = (*self.norms, self.step_bias, self.rate, self.skip)
        return sum(part.nbytes() for part in parts) + sum(each.nbytes for each in plain)
