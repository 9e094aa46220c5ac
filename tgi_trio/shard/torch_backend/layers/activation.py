"""Activation functions by the names config.json gives them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.nn import functional

from tgi_trio.errors import ModelLoadError

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
    if name not in ACTIVATIONS:
        known = ", ".join(sorted(ACTIVATIONS))
        raise ModelLoadError(f"Activation {name!r} is not known; known are {known}.")
    return ACTIVATIONS[name]


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """Return cap * tanh(x / cap): values stay within +-cap (Gemma 2)."""
    return torch.tanh(x / cap) * cap
