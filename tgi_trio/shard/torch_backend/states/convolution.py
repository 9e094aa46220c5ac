"""A depthwise causal convolution, whose state is its last inputs: a part of most mixers.

On a device it is one launch, whatever the rows' lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.nn import functional

from tgi_trio.shard.torch_backend.layers.attention.beside_heads import BesideHeads, HeadLaunch
from tgi_trio.shard.torch_backend.states.steps import StateSteps
from tgi_trio.shard.torch_backend.torch_device import overlap, runs_kernels

_BLOCK: Final = 512  # channels of a program
_TILE: Final = 8  # tokens of a program


class ConvolutionLaunch(NamedTuple):
    """What `convolve` is launched with."""

    out: torch.Tensor  # [T, channels], which it writes
    grid: tuple[int, int]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]


class CausalConvolution:
    """y_t = sum_k w_k x_(t - (taps - 1 - k) * dilation) + b, separately for each channel."""

    def __init__(
        self, kernel: torch.Tensor, bias: torch.Tensor | None = None, *, dilation: int = 1
    ) -> None:
        """`kernel` [channels, taps]: the weight of the token itself is last; `bias` [channels]."""
        self.kernel = kernel.t().contiguous()  # [taps, channels]
        self.bias = bias
        self._dilation = dilation
        self._before = (kernel.shape[1] - 1) * dilation

    def __call__(
        self,
        x: torch.Tensor,
        tails: torch.Tensor,
        steps: StateSteps,
        *,
        silu: bool = False,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Return y [T, channels] of `x` [T, channels], with `silu` that activation of it.

        `tails` [slots, (taps - 1) * dilation, channels]: the inputs before each row's first token,
        oldest first; overwritten by the last inputs up to its last token. `dtype`: of the result,
        which is rounded to that of `x` in any case; None: that of `x`.
        """
        dtype = dtype or x.dtype
        if runs_kernels(x.device):
            return self._launch(x, tails, steps, silu=silu, dtype=dtype)
        y = self._convolve(x, tails, steps)
        y = y if self.bias is None else y + self.bias
        return (functional.silu(y) if silu else y).to(dtype)

    def scale_inputs(self, factors: Sequence[float], counts: Sequence[int]) -> None:
        """Multiply all inputs by factors: the first of as many channels as the first count, etc.

        By way of the weights; what a row keeps is not multiplied.
        """
        each = torch.tensor(factors).repeat_interleave(torch.tensor(counts))
        self.kernel = (self.kernel.float() * each.to(self.kernel.device)).to(self.kernel.dtype)

    def apply_gated(
        self, projected: torch.Tensor, tails: torch.Tensor, steps: StateSteps
    ) -> torch.Tensor:
        """Return c * y for x = b * own; `projected` [T, 3 * channels]: b, c, own."""
        b, c, own = projected.chunk(3, dim=-1)
        if runs_kernels(own.device):
            return self._launch(own, tails, steps, dtype=own.dtype, gates=(b, c))
        return c * self(b * own, tails, steps)

    def _convolve(self, x: torch.Tensor, tails: torch.Tensor, steps: StateSteps) -> torch.Tensor:
        """Return the sums, and overwrite `tails`."""
        tail = steps.read(tails).to(x.dtype)
        if steps.decodes:
            window = torch.cat((tail, x.unsqueeze(1)), dim=1)
            steps.write(tails, window[:, 1:])
            return (window[:, :: self._dilation] * self.kernel).sum(dim=1)
        before = self._before
        # Each row's tail, then its inputs, row after row.
        joined = torch.empty(
            (len(x) + tail.shape[0] * before, x.shape[1]), dtype=x.dtype, device=x.device
        )
        inputs, firsts, lasts = steps.places_after(before)
        joined[inputs] = x
        joined[firsts] = tail.flatten(0, 1)
        steps.write(tails, joined[lasts].view(tail.shape))
        y = joined[inputs] * self.kernel[-1]
        for k, weights in enumerate(self.kernel[:-1]):
            y += joined[inputs - (before - k * self._dilation)] * weights
        return y

    def _launch(
        self,
        x: torch.Tensor,
        tails: torch.Tensor,
        steps: StateSteps,
        *,
        dtype: torch.dtype,
        silu: bool = False,
        gates: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Do the same in a kernel; `gates`: factors of `x`, and of the result."""
        from tgi_trio.shard.torch_backend.kernels.states import convolving  # imports Triton

        launch = self.prepare(x, tails, steps, dtype=dtype, silu=silu, gates=gates)
        convolving.convolve[launch.grid](*launch.arguments, **launch.constants)
        return launch.out

    def prepare(
        self,
        x: torch.Tensor,
        tails: torch.Tensor,
        steps: StateSteps,
        *,
        dtype: torch.dtype,
        silu: bool = False,
        gates: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> ConvolutionLaunch:
        """Return the launch of a kernel that does the same."""
        (tokens, channels), rows = x.shape, len(steps.reads)
        out = torch.empty((tokens, channels), dtype=dtype, device=x.device)
        tiles = 0 if steps.decodes else -(-tokens // _TILE)
        starts, places = (steps.reads, steps.reads) if steps.decodes else steps.spans()
        arguments = (
            *(out, x, *(gates or (x, x)), tails, self.kernel),
            *(self.kernel if self.bias is None else self.bias, starts, places),
            *(steps.reads, steps.writes, steps.fresh, rows, tokens, x.stride(0)),
        )
        constants = {
            **{"CHANNELS": channels, "WIDTH": _BLOCK, "TILE": _TILE, "TAPS": len(self.kernel)},
            **{"DILATION": self._dilation, "BIASED": self.bias is not None, "SILU": silu},
            **{"GATED": gates is not None, "DECODES": steps.decodes},
        }
        return ConvolutionLaunch(out, (rows + tiles, -(-channels // _BLOCK)), arguments, constants)

    @property
    def channels(self) -> int:
        return self.kernel.shape[1]

    def nbytes(self) -> int:
        return self.kernel.nbytes + (0 if self.bias is None else self.bias.nbytes)


class PendingConvolution(BesideHeads):
    """A convolution that is computed when a layer's heads are rotated, see `CausalConvolution`."""

    __slots__ = ("_convolution", "_silu", "_steps", "_tails", "_x")

    def __init__(
        self,
        convolution: CausalConvolution,
        x: torch.Tensor,
        tails: torch.Tensor,
        steps: StateSteps,
        *,
        silu: bool,
    ) -> None:
        super().__init__()
        self._convolution = convolution
        self._x = x
        self._tails = tails
        self._steps = steps
        self._silu = silu

    @property
    def joins(self) -> bool:
        return runs_kernels(self._x.device)

    def _compute(self) -> torch.Tensor:
        return self._convolution(self._x, self._tails, self._steps, silu=self._silu)

    def _launch_with(self, heads: HeadLaunch) -> torch.Tensor:
        from tgi_trio.shard.torch_backend.kernels.attention import beside_heads  # imports Triton

        x = self._x
        own = self._convolution.prepare(x, self._tails, self._steps, dtype=x.dtype, silu=self._silu)
        rows, parts = own.grid
        beside_heads.rotate_and_convolve[(heads.total + rows * parts,)](
            *heads.arguments,
            *own.arguments,
            heads.total,
            **heads.constants,
            PROGRAMS=heads.programs,
            **own.constants,
            **overlap(x.device),
        )
        return own.out
