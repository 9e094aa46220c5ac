"""The frequencies of rotary embeddings (RoPE), for every kind of scaling.

No torch in this file: the CPU kernels use it as well. Numbers are float32, as in transformers.
Powers are rounded to the nearest float32; torch's sometimes differ from that in the last bit.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.model.specs.decoder import RotarySpec

Floats = NDArray[np.float32]

_AXES: Final = 3  # time, row, column: of sections that alternate


def rotary_frequencies(spec: RotarySpec) -> tuple[Floats, float]:
    """Return radians per position, float32 [dim / 2], and what cosines and sines are scaled by.

    "dynamic" and "longrope": those of short sequences.
    """
    frequencies, scale = _FREQUENCIES[spec.kind](spec)
    return _direct(spec, frequencies), scale


def rotary_axes(spec: RotarySpec) -> NDArray[np.int64] | None:
    """Return with which part of a position each pair turns, [dim / 2]; None: all with the first.

    0: time, 1: row, 2: column; Hunyuan VL has others, and more. Sections in turns are Qwen2-VL's,
    alternating ones Qwen3-VL's.
    """
    if not spec.sections:
        return None
    pairs = np.arange(spec.dim // 2)
    if not spec.sections_alternate:
        axes = np.repeat(np.arange(len(spec.sections)), spec.sections)
        return axes[: len(pairs)].astype(np.int64)
    axes = pairs % _AXES
    axes[pairs >= np.array(spec.sections)[axes] * _AXES] = 0  # beyond its section: time
    return axes.astype(np.int64)


def exponents(spec: RotarySpec) -> Floats:
    """Return what theta is raised to, to get the periods: [dim / 2]."""
    return np.arange(0, spec.dim, 2, dtype=np.float32) / np.float32(spec.dim)


def long_frequencies(spec: RotarySpec) -> tuple[Floats, float]:
    """Return longrope's frequencies and scale of sequences beyond the original length."""
    frequencies, scale = _longrope(spec, "long")
    return _direct(spec, frequencies), scale


def short_length(spec: RotarySpec) -> int | None:
    """Return how long sequences are at most that turn with `rotary_frequencies`; None: any."""
    if spec.kind == "longrope":
        return int(spec.parameters["original_max_position_embeddings"])
    return spec.max_positions if spec.kind == "dynamic" else None


def compute_frequencies(spec: RotarySpec, lengths: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Return the frequencies of tokens, float32 [T, dim / 2], and scales of cosines, [T, 1].

    `lengths` [T]: of their sequences when transformers would have computed them.
    """
    frequencies, scale = rotary_frequencies(spec)
    scales = np.full((len(lengths), 1), scale, np.float32)
    limit = short_length(spec)
    if limit is None:
        return np.broadcast_to(frequencies, (len(lengths), len(frequencies))), scales
    if spec.kind == "dynamic":
        return _direct(spec, _dynamic(spec, lengths)), scales
    is_long = (lengths > limit)[:, None]
    frequencies_beyond, scale_beyond = long_frequencies(spec)
    scales[is_long] = scale_beyond
    return np.where(is_long, frequencies_beyond, frequencies), scales


def _direct(spec: RotarySpec, frequencies: Floats) -> Floats:
    """Return the frequencies with the sign of the direction in which pairs are rotated."""
    return -frequencies if spec.backwards else frequencies


def _dynamic(spec: RotarySpec, lengths: NDArray[np.int64]) -> Floats:
    """NTK-aware base that grows with the sequence; [T, dim / 2]."""
    factor, limit = spec.parameters["factor"], spec.max_positions
    longest = np.maximum(lengths, limit).astype(np.float64)
    grown = (factor * longest / limit) - (factor - 1)
    base = spec.theta * grown ** (spec.dim / (spec.dim - 2))
    periods: Floats = np.power(base[:, None], exponents(spec)).astype(np.float32)
    return np.float32(1.0) / periods


def _periods(spec: RotarySpec) -> Floats:
    return np.power(spec.theta, exponents(spec), dtype=np.float64).astype(np.float32)


def _default(spec: RotarySpec) -> tuple[Floats, float]:
    return 1.0 / _periods(spec), 1.0


def _linear(spec: RotarySpec) -> tuple[Floats, float]:
    return _default(spec)[0] / spec.parameters["factor"], 1.0


def _llama3(spec: RotarySpec) -> tuple[Floats, float]:
    """Long wavelengths divided by the factor, short ones kept, a smooth ramp between."""
    p = spec.parameters
    factor, low, high = p["factor"], p["low_freq_factor"], p["high_freq_factor"]
    original = p["original_max_position_embeddings"]
    plain = _default(spec)[0]
    wavelength = 2 * math.pi / plain
    is_long, is_short = wavelength > original / low, wavelength < original / high
    scaled = np.where(is_long, plain / factor, plain)
    smooth = (original / wavelength - low) / (high - low)
    ramp = (1 - smooth) * scaled / factor + smooth * scaled
    return np.where(~is_long & ~is_short, ramp, scaled), 1.0


def _yarn(spec: RotarySpec) -> tuple[Floats, float]:
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
    ramp = ((np.arange(spec.dim // 2, dtype=np.float32) - low) / (high - low)).clip(0, 1)
    periods = _periods(spec)
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


def _longrope(spec: RotarySpec, length: str = "short") -> tuple[Floats, float]:
    """One divisor per frequency, another set beyond the original length (Ding et al. 2024).

    Phi-3.5-MoE gives a scale with each set, and its authors' code uses both of a set (transformers
    keeps the short set's frequencies).
    """
    p = spec.parameters
    original = p["original_max_position_embeddings"]
    factor = p.get("factor") or spec.max_positions / original
    scale = p.get(f"{length}_mscale") or p.get("attention_factor")
    if scale is None:
        scale = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    return 1.0 / (np.array(p[f"{length}_factor"], np.float32) * _periods(spec)), float(scale)


def _proportional(spec: RotarySpec) -> tuple[Floats, float]:
    """The first pairs turn as if all did, the others stand still (Gemma 4, LFM3)."""
    p, frequencies = spec.parameters, _default(spec)[0]
    turning = int(p.get("partial_rotary_factor", 1.0) * spec.dim // 2)
    frequencies[turning:] = 0.0
    return frequencies / np.float32(p.get("factor", 1.0)), 1.0


_FREQUENCIES = {
    "proportional": _proportional,
    "default": _default,
    "linear": _linear,
    "dynamic": _default,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "divided": _longrope,  # its two sets are one
}
