"""A depthwise causal convolution, whose state is its last inputs: a part of most mixers."""

from __future__ import annotations

import torch

from tgi_trio.shard.torch_backend.states.steps import StateSteps


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

    def __call__(self, x: torch.Tensor, tails: torch.Tensor, steps: StateSteps) -> torch.Tensor:
        """Return y [T, channels] of `x` [T, channels].

        `tails` [slots, (taps - 1) * dilation, channels]: the inputs before each row's first token,
        oldest first; overwritten by the last inputs up to its last token.
        """
        tail = steps.read(tails).to(x.dtype)
        if steps.decodes:
            window = torch.cat((tail, x.unsqueeze(1)), dim=1)
            steps.write(tails, window[:, 1:])
            return self._finish((window[:, :: self._dilation] * self.kernel).sum(dim=1))
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
        return self._finish(y)

    def _finish(self, y: torch.Tensor) -> torch.Tensor:
        return y if self.bias is None else y + self.bias

    @property
    def channels(self) -> int:
        return self.kernel.shape[1]

    def nbytes(self) -> int:
        return self.kernel.nbytes + (0 if self.bias is None else self.bias.nbytes)
