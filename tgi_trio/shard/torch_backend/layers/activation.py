"""Activation functions by the names config.json gives them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch.nn import functional

from tgi_trio.model.specs.activations import check_activation

Activation = Callable[[torch.Tensor], torch.Tensor]


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def _gelu_bloom(x: torch.Tensor) -> torch.Tensor:
    # Bloom writes sqrt(2 / pi) with eight digits.
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


def _relu_squared(x: torch.Tensor) -> torch.Tensor:
    return functional.relu(x).square()


def _gelu_ten(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x).clamp(-10.0, 10.0)


_TANH_GELU = functools.partial(functional.gelu, approximate="tanh")

ACTIVATIONS: dict[str, Activation] = {
    "silu": functional.silu,
    "swish": functional.silu,
    "gelu": functional.gelu,
    "gelu_new": _TANH_GELU,
    "gelu_fast": _TANH_GELU,
    "gelu_pytorch_tanh": _TANH_GELU,
    "gelu_bloom": _gelu_bloom,
    "gelu_10": _gelu_ten,
    "quick_gelu": _quick_gelu,
    "relu": functional.relu,
    "relu2": _relu_squared,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


def activation(name: str) -> Activation:
    """Return the function called `name`; raises ModelLoadError for one we do not have."""
    check_activation(name, learned=False)
    return ACTIVATIONS[name]


@dataclass(frozen=True, slots=True, eq=False)
class Xielu:
    """xIELU (Huang 2024, arXiv 2411.13010), with parameters that each layer has learned."""

    positive: torch.Tensor  # [1], as are all: the factor of x * x
    negative: torch.Tensor
    beta: torch.Tensor
    eps: torch.Tensor

    @staticmethod
    def of(
        alpha_p: torch.Tensor, alpha_n: torch.Tensor, beta: torch.Tensor, eps: torch.Tensor
    ) -> Xielu:
        """Return it from a checkpoint's parameters, [1] each."""
        return Xielu(functional.softplus(alpha_p), beta + functional.softplus(alpha_n), beta, eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        below = (torch.expm1(torch.minimum(x, self.eps)) - x) * self.negative
        return torch.where(x > 0, self.positive * x * x, below) + self.beta * x


@dataclass(frozen=True, slots=True)
class SparseActivation:
    """An activation of what exceeds a threshold, less the threshold (Gemma 3n: "Gaussian top-k").

    If the numbers were normally distributed, `share` of them would lie below the threshold.
    """

    act: Activation
    share: float

    @property
    def deviations(self) -> float:
        """The threshold, in standard deviations above the mean."""
        return NormalDist().inv_cdf(self.share)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        spread = torch.std(x, dim=-1, keepdim=True, unbiased=False)
        bound = x.mean(dim=-1, keepdim=True) + spread * self.deviations
        return self.act(functional.relu(x - bound))


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """Return cap * tanh(x / cap): values stay within +-cap (Gemma 2)."""
    return torch.tanh(x / cap) * cap
