"""Rescales and normalises pixels as the model's image processor would."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.config import read_values
from tgi_trio.model.image_families import ImageFamily, PatchOrder
from tgi_trio.model.processor_files import ALONE, NESTED, read_image_processor
from tgi_trio.model.published import find_pictures
from tgi_trio.shard.checkpoint.numbers import to_bfloat16, to_float32

_LEVELS: Final = 256  # values of a byte
_PLAIN: Final = ImageFamily("", "")


@dataclass(frozen=True, slots=True)
class Normalising:
    """Normalisation by table: the number for each byte of a channel."""

    table: NDArray[np.float32]  # [3, 256]
    patch_order: PatchOrder = "channels"
    frames: int = 1  # of a patch that is stored frame by frame

    @classmethod
    def read(cls, folder: Path, family: ImageFamily = _PLAIN, prefix: str = "") -> Normalising:
        """Return the normalisation of a model's folder; raises ModelLoadError if incomplete.

        `prefix`: of the names of mean and deviation. For a family with `halves`, if it both
        rescales and normalises, intermediate results are rounded to bfloat16.
        """
        pictures = find_pictures(read_values(folder) or {})
        settings = _read_settings(folder) if pictures is None else dict(pictures.image_processor)
        names = [f"{prefix}image_{name}" for name in ("mean", "std")]
        for name, older in zip(names, family.older_normal or (), strict=False):
            if older in settings:
                settings.setdefault(name, settings[older])
        if family.normal is not None:
            settings = dict(zip(names, family.normal, strict=True)) | settings
        rescales, normalises = (settings.get(f"do_{how}", True) for how in ("rescale", "normalize"))
        halves = family.halves and rescales and normalises

        def rounded(numbers: NDArray[np.float32]) -> NDArray[np.float32]:
            return to_float32(to_bfloat16(numbers)) if halves else numbers

        values = np.tile(np.arange(_LEVELS, dtype=np.float32), (3, 1))
        if rescales:
            values = rounded(values * np.float32(settings.get("rescale_factor", 1 / 255)))
        if normalises:
            mean, deviation = (rounded(_three(settings, name, folder)) for name in names)
            values = rounded(rounded(values - mean) / deviation)
        frames = settings.get("temporal_patch_size", 2) if family.patch_order == "frames" else 1
        return cls(values, family.patch_order, frames)

    def apply(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return pixels as float32 of the same shape.

        Channels are the third dimension from the end; in patches [P, N] they are where
        `patch_order` says. If all three have the same table, any layout will do. Raises ValueError
        for pixels of another layout.
        """
        if (self.table == self.table[0]).all():
            same: NDArray[np.float32] = self.table[0][pixels]
            return same
        by_pixel = self.patch_order == "pixels"
        flat, runs = by_pixel or pixels.ndim < 3, 3 * self.frames
        if not pixels.ndim or (pixels.shape[-1] % runs if flat else pixels.shape[-3] != 3):
            raise ValueError(f"pixels of shape {pixels.shape} have no three channels")
        whole, axis = pixels, -3
        if flat:
            count = pixels.shape[-1] // runs
            parts, axis = ((count, 3), -1) if by_pixel else ((self.frames, 3, count), -2)
            whole = pixels.reshape(*pixels.shape[:-1], *parts)
        found = np.empty(whole.shape, np.float32)
        channels, targets = np.moveaxis(whole, axis, 0), np.moveaxis(found, axis, 0)
        for table, channel, target in zip(self.table, channels, targets, strict=True):
            target[...] = table[channel]
        return found.reshape(pixels.shape)


def _read_settings(folder: Path) -> dict[str, Any]:
    if (settings := read_image_processor(folder)) is None:
        names = f"{ALONE} or {NESTED[0]}"
        raise ModelLoadError(f"{folder} has no {names} that says how pixels are normalised.")
    return settings


def _three(settings: Mapping[str, Any], name: str, folder: Path) -> NDArray[np.float32]:
    given = settings.get(name)
    try:
        values = np.broadcast_to(np.array(given, np.float32), 3)
    except (TypeError, ValueError):
        values = np.full(3, np.nan, np.float32)
    if not np.isfinite(values).all() or (name.endswith("std") and not values.all()):
        raise ModelLoadError(
            f"The image processor of {folder} has {name} {given!r}; it must be three numbers."
        )
    return values[:, None]
