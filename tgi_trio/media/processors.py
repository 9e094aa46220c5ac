"""Which image processor a family of models has, and how it is called.

Always those of transformers that compute with numpy and Pillow, by name: the others need
torchvision, and where that is installed its resampling would change tokens. What transformers has
for torchvision alone is made here (`tiling.py`, `patching.py`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import ModelLoadError
from tgi_trio.media.cutting import Arrays, Tiler
from tgi_trio.media.minimax_m3 import limit_size
from tgi_trio.media.patching import tile_gemma4, tile_kimi, tile_muse, tile_nemotron
from tgi_trio.media.tiling import (
    tile_cohere2,
    tile_deepseek_ocr,
    tile_deepseek_ocr2,
    tile_lfm2,
    tile_llama4,
    tile_perception,
    tile_phi4,
    tile_step3p7,
)


@dataclass(frozen=True, slots=True)
class Processor:
    """A class of transformers', and what its caller sets whatever a model's files say."""

    module: str  # below transformers.models
    name: str  # without its ending
    fixed: Mapping[str, Any] = field(default_factory=dict)
    amend: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict  # of a model's files
    drops: tuple[str, ...] = ()  # of what it makes, what its tower does not read
    apart: bool = False  # an image by itself is made otherwise than one of several


_OTHER: Final = np.zeros((1, 1, 3), np.uint8)  # stands for all other images of a prompt
_MINICPM_OCR: Final = {"downsample_mode": "4x"}  # where its files say nothing

# By family; `model.image_families` says which families of models have which.
PROCESSORS: Final[Mapping[str, Processor | Callable[[Mapping[str, Any]], Tiler]]] = {
    "cohere2": tile_cohere2,
    "deepseek_ocr": tile_deepseek_ocr,
    "deepseek_ocr2": tile_deepseek_ocr2,
    "deepseek_vl": Processor("deepseek_vl", "DeepseekVL"),
    "deepseek_vl_hybrid": Processor("deepseek_vl_hybrid", "DeepseekVLHybrid"),
    "gemma3": Processor("gemma3", "Gemma3", {"do_pan_and_scan": False}),
    "gemma4": Processor("gemma4", "Gemma4"),
    "gemma4_unified": tile_gemma4,
    "glm4v": Processor("glm4v", "Glm4v"),
    "glm5_next": Processor("glm5_next", "Glm5Next"),
    "got_ocr2": Processor("got_ocr2", "GotOcr2", {"crop_to_patches": False}),
    "granite_docling": Processor(
        *("granite_docling", "GraniteDocling", {"fine_route": False}), drops=("rows", "cols")
    ),
    "hunyuan_vl": Processor("hunyuan_vl", "HunYuanVL"),
    "idefics": Processor("idefics", "Idefics"),
    "idefics2": Processor("idefics2", "Idefics2"),
    "idefics3": Processor("idefics3", "Idefics3"),
    "internvl": Processor("got_ocr2", "GotOcr2", {"crop_to_patches": True}),
    "kimi": tile_kimi,
    "lfm2": tile_lfm2,
    "llama4": tile_llama4,
    "llava": Processor("llava", "Llava"),
    "llava_next": Processor("llava_next", "LlavaNext"),
    "llava_onevision": Processor("llava_onevision", "LlavaOnevision", apart=True),
    "minicpm_ocr": Processor(
        "minicpmv4_6", "MiniCPMV4_6", {"do_resize": True}, lambda found: {**_MINICPM_OCR, **found}
    ),
    "minicpmv": Processor("minicpmv4_6", "MiniCPMV4_6", {"do_resize": True}),
    "minimax_m3": Processor("qwen2_vl", "Qwen2VL", amend=limit_size),
    "mllama": Processor("mllama", "Mllama"),
    "muse": tile_muse,
    "nemotron": tile_nemotron,
    "ovis2": Processor("ovis2", "Ovis2"),
    "paddleocr": Processor("paddleocr_vl", "PaddleOCRVL"),
    "perception_lm": tile_perception,
    "phi4": tile_phi4,
    "pixtral": Processor("pixtral", "Pixtral"),
    "qwen2_vl": Processor("qwen2_vl", "Qwen2VL"),
    "siglip": Processor("siglip", "Siglip"),
    "smolvlm": Processor("smolvlm", "SmolVLM"),
    "step3p7": tile_step3p7,
}
# Rescaling and normalising are the shard's: until then pixels are bytes.
_LEFT_OUT: Final = {"do_rescale": False, "do_normalize": False}


class PixelProcessor:
    """Makes of an image what its model's tower reads."""

    def __init__(self, family: str, settings: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        """`settings`: the model's own; `given`: what its processor hands on for each image.

        Raises ModelLoadError.
        """
        row = PROCESSORS.get(family)
        if row is None:
            known = ", ".join(PROCESSORS)
            raise ModelLoadError(f"no image processor is known of {family!r}, only of {known}")
        if isinstance(row, Processor):
            self._process = _load(row, settings, given)
        else:
            tile = row(settings)
            self._process = lambda pixels, beside: tile(pixels)

    def process(self, pixels: NDArray[np.uint8], beside: bool = False) -> Arrays:
        """Return the arrays of one image, uint8 [height, width, 3]; raises ValueError.

        `beside`: its prompt has others, and its layout says that it is seen otherwise then.
        """
        return self._process(pixels, beside)


def _load(
    row: Processor, settings: Mapping[str, Any], given: Mapping[str, Any]
) -> Callable[[NDArray[np.uint8], bool], Arrays]:
    name = f"transformers.models.{row.module}.image_processing_pil_{row.module}"
    try:
        module = importlib.import_module(name)
        made = getattr(module, f"{row.name}ImageProcessorPil")
        processor = made.from_dict({**row.amend(settings), **row.fixed, **_LEFT_OUT})
    except (ImportError, AttributeError) as error:
        raise ModelLoadError(
            f"the installed transformers has no {row.name}ImageProcessorPil: {error}"
        ) from error
    except (TypeError, ValueError) as error:
        raise ModelLoadError(
            f"the settings of the image processor cannot be used: {error}"
        ) from error

    def process(pixels: NDArray[np.uint8], beside: bool) -> Arrays:
        among = beside and row.apart
        images = [[pixels, _OTHER]] if among else [pixels]
        found = processor(images, return_tensors="np", input_data_format="channels_last", **given)
        arrays = {"pixel_values": found} if isinstance(found, np.ndarray) else found
        own = slice(1) if among else slice(None)  # without the other's
        kept = {name: value for name, value in arrays.items() if name not in row.drops}
        return {name: np.ascontiguousarray(value[own]) for name, value in kept.items()}

    return process
