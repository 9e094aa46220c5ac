"""Weights in the layouts the kernels read. bfloat16 is held as uint16, its bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.cpu.kernels.variant import PANEL
from tgi_trio.shard.cpu.memory import zeroed

Floats = NDArray[np.float32]


def to_float32(values: NDArray[Any]) -> Floats:
    """Return float32 of what a checkpoint holds: float32, float16, or uint16 for bfloat16."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(values, np.float32)


def to_bfloat16(values: NDArray[Any]) -> NDArray[np.uint16]:
    """Return the bits of the nearest bfloat16 numbers, the even one from half-way."""
    if values.dtype == np.uint16:
        return values
    bits = to_float32(values).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.astype(np.uint16)


def stored(values: NDArray[Any], bf16: bool) -> NDArray[Any]:
    """Return values as weights are stored; a view where nothing changes."""
    return np.ascontiguousarray(to_bfloat16(values) if bf16 else to_float32(values))


def pack(weight: NDArray[Any], bf16: bool) -> NDArray[Any]:
    """Return a weight [out, in] as panels, the outputs padded with zeros to whole panels.

    bfloat16: uint32 [out / 32, in / 2, 32], a pair of input features in each; float32:
    [out / 32, in, 32]. `in` must be a multiple of 16. See `kernels/linear.py`.
    """
    rows = stored(weight, bf16)
    if bf16:
        rows = rows.view(np.uint32)
    outputs, inputs = rows.shape
    panels = zeroed((-(-outputs // PANEL), inputs, PANEL), rows.dtype)
    whole = outputs // PANEL
    np.copyto(panels[:whole], rows[: whole * PANEL].reshape(whole, PANEL, inputs).swapaxes(1, 2))
    if outputs % PANEL:
        panels[whole, :, : outputs % PANEL] = rows[whole * PANEL :].T
    return panels


def interleave(gate: NDArray[Any], up: NDArray[Any]) -> NDArray[Any]:
    """Return [2 * width, ...]: 16 rows of `gate`, 16 of `up`, and so on.

    Both halves of a gated unit then come out of the same panel. `width` is a multiple of 16.
    """
    half = PANEL // 2
    parts = [part.reshape(-1, half, *part.shape[1:]) for part in (gate, up)]
    return np.stack(parts, axis=1).reshape(2 * len(gate), *gate.shape[1:])
