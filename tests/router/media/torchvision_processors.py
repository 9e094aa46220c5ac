"""transformers' image processors that need torchvision, with torch's own resampling in its place.

It is what torchvision calls for bytes: of both the results are the same to the last bit.
"""

from __future__ import annotations

import importlib
import sys
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.image_processing_backends import TorchvisionBackend
from transformers.image_utils import SizeDict, make_flat_list_of_images

_MODES = {1: "lanczos", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers


@cache
def processor_module(family: str, kind: str = "image") -> Any:
    """Return the module, which imports torchvision, and of that needs next to nothing."""
    import transformers.image_processing_backends
    import transformers.video_processing_utils  # noqa: F401 - both do well without it

    functional = ModuleType("torchvision.transforms.v2.functional")
    vars(functional).update(pad=_pad, resize=_resize, InterpolationMode=int)
    names = ["torchvision", "torchvision.transforms", "torchvision.transforms.v2"]
    stands = {name: ModuleType(name) for name in names}
    vars(stands[names[-1]])["functional"] = functional
    stands[functional.__name__] = functional
    were = {name: sys.modules.get(name) for name in stands}
    sys.modules.update(stands)
    try:
        return importlib.import_module(f"transformers.models.{family}.{kind}_processing_{family}")
    finally:
        for name, module in were.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def _pad(images: torch.Tensor, padding: list[int], fill: Any) -> torch.Tensor:
    left, top, right, bottom = padding
    value, *_ = fill if isinstance(fill, list) else [fill]
    return torch.nn.functional.pad(images, (left, right, top, bottom), value=value)


def _resize(
    image: torch.Tensor, size: list[int], interpolation: int = 2, antialias: bool = True
) -> torch.Tensor:
    found = torch.nn.functional.interpolate(
        image.reshape(-1, *image.shape[-3:]), size, mode=_MODES[interpolation], antialias=antialias
    )
    return found.reshape(*image.shape[:-2], *size)


class TorchProcessor:
    """A processor's own arithmetic; as with ours, bytes are neither rescaled nor normalised."""

    def __init__(self, family: str, name: str, **settings: Any) -> None:
        self.module = processor_module(family)
        self._whole = getattr(self.module, f"{name}ImageProcessor")
        names = {*self._whole.valid_kwargs.__annotations__, "resample", "size", "patch_size"}
        known = {name: getattr(self._whole, name) for name in names if hasattr(self._whole, name)}
        self._settings = {**known, **settings}
        self._size = SizeDict(**self._settings["size"])

    def __getattr__(self, name: str) -> Any:
        found = self._settings.get(name)
        return found if name in self._settings else getattr(self._whole, name).__get__(self)

    def resize(self, image: torch.Tensor, size: Any, resample: int) -> torch.Tensor:
        if image.shape[-2:] == (size.height, size.width):
            return image
        return _resize(image, [size.height, size.width], resample, antialias=True)

    def rescale_and_normalize(self, images: torch.Tensor, *_: Any) -> torch.Tensor:
        return images

    def __call__(self, images: list[Any], **_: Any) -> dict[str, Any]:
        flat: Any = make_flat_list_of_images(images)
        parts = [torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in flat]
        given = {**self._settings, "size": self._size, "do_resize": True}
        found: dict[str, Any] = self._whole._preprocess(
            self,
            [part.contiguous() for part in parts],
            **given,
            disable_grouping=True,
            return_tensors=None,
        )
        return found

    def pixels(self, image: Any) -> NDArray[np.uint8]:
        """Return the tiles of one image, uint8 [tiles, 3, side, side]."""
        found = self([image])["pixel_values"]
        tiles = torch.cat([part.reshape(-1, *part.shape[-3:]) for part in found])
        joined: NDArray[np.uint8] = tiles.numpy()
        return joined


class _TorchResize(TorchvisionBackend):
    """What resizes, with torch's own resampling, and fills up at the right and below."""

    def pad(self, images: list[torch.Tensor], pad_size: Any = None, *_: Any, **__: Any) -> Any:
        size = (pad_size.height, pad_size.width)
        filled = [torch.zeros(*part.shape[:-2], *size, dtype=part.dtype) for part in images]
        for room, part in zip(filled, images, strict=True):
            room[..., : part.shape[-2], : part.shape[-1]] = part
        return filled

    def resize(
        self,
        image: torch.Tensor,
        size: SizeDict,
        resample: Any = None,
        antialias: bool = True,
        **_: Any,
    ) -> torch.Tensor:
        assert size.height is not None and size.width is not None
        if image.shape[-2:] == (size.height, size.width):
            return image
        return _resize(image, [size.height, size.width], resample, antialias)

    def normalize(  # type: ignore[override]
        self, image: torch.Tensor, mean: Any, std: Any, **_: Any
    ) -> torch.Tensor:
        return (image - mean[:, None, None]) / std[:, None, None]


def inherited_processor(family: str, name: str, **settings: Any) -> Any:
    """Return a processor that resizes by what it inherits: its class, with another one above it."""
    return whole_processor(family, name, **settings, do_rescale=False, do_normalize=False)


def whole_processor(family: str, name: str, **settings: Any) -> Any:
    """Return one that also rescales and normalises."""
    own = getattr(processor_module(family), f"{name}ImageProcessor")
    return type("Torch", (own, _TorchResize), {})(**settings)


def video_processor(family: str, name: str, **settings: Any) -> Any:
    """Return a video processor that resizes with torch's own resampling."""
    whole = getattr(processor_module(family, "video"), f"{name}VideoProcessor")
    return type(f"{name}VideoProcessor", (whole, _TorchResize), {})(
        do_convert_rgb=False, **settings
    )
