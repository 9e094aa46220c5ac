"""Rotary position embeddings and their scalings, in transformers' numerics.

Frequencies are float32. Scalings whose frequencies depend on the length of the sequence (dynamic,
longrope) take for each token the length its sequence had when transformers would have computed it:
the whole prompt for prompt tokens, position + 1 for generated ones. So a token's K is the same
whether its prompt came in one chunk or many, alone or in a batch, first time or replayed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from tgi_trio.errors import ModelLoadError

RotaryKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """One way of rotating. `parameters`: the scaling's own numbers, named as in config.json."""

    dim: int  # leading dimensions of a head that are rotated
    theta: float = 10000.0
    kind: RotaryKind = "default"
    interleaved: bool = False  # pairs are neighbours (GPT-J) rather than half a head apart
    max_positions: int = 0
    parameters: dict[str, Any] = field(default_factory=dict, hash=False)


class Rotary:
    """Cosines and sines for the tokens of a step."""

    def __init__(self, spec: RotarySpec, device: torch.device) -> None:
        self.spec = spec
        self.device = device
        self.scale = 1.0  # set by yarn and longrope: multiplies cosines and sines
        self.by_length = spec.kind in ("dynamic", "longrope")
        if spec.kind not in _FREQUENCIES:
            known = ", ".join(_FREQUENCIES)
            raise ModelLoadError(f"Rotary scaling {spec.kind!r} is not known; known are {known}.")
        self.frequencies, self.scale = _FREQUENCIES[spec.kind](spec)
        self.frequencies = self.frequencies.to(device)
        if spec.kind == "longrope":
            self.long_frequencies = _longrope(spec, long=True)[0].to(device)

    def table(
        self, positions: torch.Tensor, lengths: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (cos, signed sin), each [T, 1, dim] of `dtype`.

        `positions` int64 [T]; `lengths` int64 [T] as the module says, read by `by_length` kinds.
        The sign of the rotation is folded into the sine, so that applying is two products.
        """
        angles = positions[:, None].float() * self._frequencies(lengths)
        cos, sin = angles.cos(), angles.sin()
        if self.spec.interleaved:
            cos = cos.repeat_interleave(2, dim=-1)
            sin = torch.stack((-sin, sin), dim=-1).flatten(-2)
        else:
            cos = torch.cat((cos, cos), dim=-1)
            sin = torch.cat((-sin, sin), dim=-1)
        if self.scale != 1.0:
            cos, sin = cos * self.scale, sin * self.scale
        return cos.to(dtype)[:, None], sin.to(dtype)[:, None]

    def apply(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate the leading `dim` dimensions of `x` [T, heads, head_dim]."""
        dim = self.spec.dim
        if dim < x.shape[-1]:
            turned = self.apply(x[..., :dim], cos, sin)
            return torch.cat((turned, x[..., dim:]), dim=-1)
        if self.spec.interleaved:
            swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        else:
            half = dim // 2
            swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
        rotated: torch.Tensor = x * cos + swapped * sin
        return rotated

    def _frequencies(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return [dim / 2], or [T, dim / 2] where they depend on the length."""
        spec = self.spec
        if spec.kind == "longrope":
            original = int(spec.parameters["original_max_position_embeddings"])
            is_long = (lengths > original)[:, None]
            return torch.where(is_long, self.long_frequencies, self.frequencies)
        if spec.kind == "dynamic":
            return _dynamic_at(spec, lengths)
        return self.frequencies


def _exponents(spec: RotarySpec, device: torch.device | None = None) -> torch.Tensor:
    return torch.arange(0, spec.dim, 2, dtype=torch.int64, device=device).float() / spec.dim


def _default(spec: RotarySpec) -> tuple[torch.Tensor, float]:
    return 1.0 / (spec.theta ** _exponents(spec)), 1.0


def _linear(spec: RotarySpec) -> tuple[torch.Tensor, float]:
    return _default(spec)[0] / spec.parameters["factor"], 1.0


def _dynamic_at(spec: RotarySpec, lengths: torch.Tensor) -> torch.Tensor:
    """NTK-aware base that grows with the sequence; [T, dim / 2]."""
    factor, limit = spec.parameters["factor"], spec.max_positions
    longest = lengths.clamp(min=limit).float()
    grown = (factor * longest / limit) - (factor - 1)
    base = spec.theta * grown ** (spec.dim / (spec.dim - 2))
    frequencies: torch.Tensor = 1.0 / (base[:, None] ** _exponents(spec, lengths.device))
    return frequencies


def _llama3(spec: RotarySpec) -> tuple[torch.Tensor, float]:
    """Long wavelengths divided by the factor, short ones kept, a smooth ramp between."""
    p = spec.parameters
    factor, low, high = p["factor"], p["low_freq_factor"], p["high_freq_factor"]
    original = p["original_max_position_embeddings"]
    plain = _default(spec)[0]
    wavelength = 2 * math.pi / plain
    is_long, is_short = wavelength > original / low, wavelength < original / high
    scaled = torch.where(is_long, plain / factor, plain)
    smooth = (original / wavelength - low) / (high - low)
    ramp = (1 - smooth) * scaled / factor + smooth * scaled
    return torch.where(~is_long & ~is_short, ramp, scaled), 1.0


def _yarn(spec: RotarySpec) -> tuple[torch.Tensor, float]:
    """Interpolate slow rotations, keep fast ones (Peng et al. 2023)."""
    p = spec.parameters
    original = p["original_max_position_embeddings"]
    factor = p.get("factor") or spec.max_positions / original

    def dimension(rotations: float) -> float:
        turns = original / (rotations * 2 * math.pi)
        return (spec.dim * math.log(turns)) / (2 * math.log(spec.theta))

    low, high = dimension(p.get("beta_fast") or 32), dimension(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    if low == high:
        high += 0.001  # the ramp below divides by their difference
    ramp = ((torch.arange(spec.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    periods = spec.theta ** _exponents(spec)
    frequencies = (1.0 / (factor * periods)) * ramp + (1.0 / periods) * (1 - ramp)
    return frequencies, _yarn_scale(p, factor)


def _yarn_scale(parameters: dict[str, Any], factor: float) -> float:
    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)
    one, every = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return scale(one) / scale(every) if one and every else scale(1.0)


def _longrope(spec: RotarySpec, long: bool = False) -> tuple[torch.Tensor, float]:
    """One divisor per frequency, another set beyond the original length (Ding et al. 2024)."""
    p = spec.parameters
    original = p["original_max_position_embeddings"]
    factor = p.get("factor") or spec.max_positions / original
    scale = p.get("attention_factor")
    if scale is None:
        scale = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    divisors = torch.tensor(p["long_factor" if long else "short_factor"], dtype=torch.float32)
    return 1.0 / (divisors * spec.theta ** _exponents(spec)), float(scale)


_FREQUENCIES = {
    "default": _default,
    "linear": _linear,
    "dynamic": _default,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
