"""Processors of families that see images: transformers' own arithmetic."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers.image_utils import SizeDict

from tests.router.media.layout_families import FAMILIES
from tests.router.media.torchvision_processors import TorchProcessor, inherited_processor
from tgi_trio.router.media.layouts.layout import ImageSize

WORDS = ["\n", "\n\n", " ", "0", "1", "a", "Here", "is", "the", "and"]
# Where processors are that share another family's image processor.
WHOLES = {
    "AyaVisionProcessor": "aya_vision",
    "Exaone4_5_Processor": "exaone4_5",
    "Gemma3nProcessor": "gemma3n",
    "Glm46VProcessor": "glm46v",
    "Granite4VisionProcessor": "granite4_vision",
    "HyperCLOVAXVisionV2Processor": "hyperclovax_vision_v2",
    "InternVLProcessor": "internvl",
    "Lfm3VlProcessor": "lfm3_vl",
    "LightOnOcrProcessor": "lighton_ocr",
    "MiniCPMV4_7Processor": "minicpmv4_7",
    "PaliGemmaProcessor": "paligemma",
    "QianfanOCRProcessor": "qianfan_ocr",
    "Qwen2_5OmniProcessor": "qwen2_5_omni",
}
# Which resize by what they inherit.
INHERITED = {
    *("Gemma4Unified", "Kimi_K25", "Lfm2Vl", "MiniCPMOcr", "MiniMaxM3VL", "MuseGlimmer"),
    *("NemotronH_Omni_Reasoning_V3", "PerceptionLM", "Phi4Multimodal", "Step3p7", "UnlimitedOcr"),
}
VIDEOS = (  # whose processors take videos as well
    *("exaone4_5", "gemma4", "gemma4_unified", "glm46v", "glm4v", "glm5_next", "internvl"),
    *("hyperclovax_vision_v2", "kimi_k25", "lfm3_vl", "llava_onevision", "minicpm_ocr"),
    *("minicpmv4_6", "minicpmv4_7", "minimax_m3_vl", "muse_glimmer", "perception_lm", "qwen2_vl"),
    *("nemotron_h_omni", "qwen2_5_omni"),
)


class Pixtral:
    """PixtralProcessor, whose module wants torchvision, around transformers' own arithmetic."""

    def __init__(
        self, pixels: Any, tokenizer: Any, patch_size: int, spatial_merge_size: int = 1
    ) -> None:
        self.tokenizer = tokenizer
        self._pixels = pixels
        self._unit = patch_size * spatial_merge_size

    def _get_num_multimodal_tokens(self, image_sizes: list[ImageSize]) -> dict[str, list[int]]:
        resize = _class("pixtral.image_processing_pil_pixtral", "get_resize_output_image_size")
        [(height, width)] = image_sizes
        longest = self._pixels.size["longest_edge"]
        image = np.zeros((height, width, 3))
        unit = (self._unit, self._unit)
        height, width = resize(image, (longest, longest), unit, "channels_last")
        if not height * width:
            raise ValueError("Pillow makes no image of no pixels")
        return {"num_image_tokens": [(width // self._unit + 1) * (height // self._unit)]}

    def __call__(self, text: str, images: list[list[Any]], return_tensors: None) -> Any:
        found = self._pixels(images[0], patch_size=self._unit)
        for height, width in found["image_sizes"]:
            row = "[IMG]" * (width // self._unit)
            rows = "[IMG_BREAK]".join([row] * (height // self._unit))
            text = text.replace("[IMG] ", f"{rows}[IMG_END] ", 1)
        return self.tokenizer(text)


class Idefics:
    """IdeficsProcessor, which is given texts and images in turn."""

    def __init__(self, processor: Any) -> None:
        self.tokenizer = processor.tokenizer
        self._processor = processor

    def __call__(self, text: str, images: list[list[Any]], return_tensors: None) -> Any:
        parts = text.split("<image>")
        turns = [each for pair in zip(parts, [*images[0], ""], strict=True) for each in pair]
        found = self._processor(text=[each for each in turns if each != ""])
        return {"input_ids": found["input_ids"].numpy()}


def llama4_tokens(processor: Any, size: ImageSize) -> dict[str, list[int]]:
    """Llama4Processor, which does not tell, by the functions that its image processor calls."""
    pixels = processor.image_processor
    fit, side = pixels.module, pixels.size["height"]
    grids = fit.find_supported_resolutions(pixels.max_patches, SizeDict(**pixels.size))
    best = fit.get_best_fit(size, torch.tensor(grids), pixels.resize_to_max_canvas)
    features = (side // processor.patch_size) ** 2 // processor.downsample_ratio
    text = processor._prompt_split_image((best // side).tolist(), features)
    return {"num_image_tokens": [len(processor.tokenizer(text)["input_ids"])]}


def lfm2_tokens(processor: Any, size: ImageSize) -> dict[str, list[int]]:
    """Lfm2VlProcessor, which does not tell either."""
    pixels = processor.image_processor
    names = ("downsample_factor", "encoder_patch_size", "max_image_tokens")
    given = {name: getattr(pixels, name) for name in names}
    width, height = pixels.smart_resize(*size, min_image_tokens=pixels.min_image_tokens, **given)
    rows = columns = 1
    tolerance = pixels.max_pixels_tolerance
    if pixels.do_image_splitting and pixels._is_image_too_large(
        *size, max_pixels_tolerance=tolerance, **given
    ):
        bounds = pixels.min_tiles, pixels.max_tiles, pixels.tile_size
        columns, rows, *_ = pixels._get_grid_layout(*size, *bounds)
    counts = processor._get_image_num_tokens([height, width])
    text = processor._build_image_tokens(rows, columns, *counts, pixels.use_thumbnail, True)
    return {"num_image_tokens": [len(processor.tokenizer(text)["input_ids"])]}


def step_tokens(processor: Any, size: ImageSize) -> dict[str, list[int]]:
    """Step3p7Processor, nor does it."""
    pixels, (height, width) = processor.image_processor, size
    sides = pixels.size["height"], pixels.patch_size
    *_, columns, rows, _ = pixels._plan_patches(width, height, *sides)
    masks = [
        column == columns - 1 and row < rows - 1 for row in range(rows) for column in range(columns)
    ]
    found = {"num_local_patches": [columns * rows], "patch_newline_masks": [masks]}
    text = processor.replace_image_token(found, 0)
    return {"num_image_tokens": [len(processor.tokenizer(text)["input_ids"])]}


def ovis_tokens(processor: Any, size: ImageSize) -> dict[str, list[int]]:
    """Ovis2Processor, nor does it, by the functions that its image processor calls."""
    pixels, side = processor.image_processor, processor.image_processor.size["height"]
    fit = _class("ovis2.image_processing_pil_ovis2", "get_min_tile_covering_grid")
    columns, rows = 1, 1
    if pixels.crop_to_patches and pixels.use_covering_area_grid:
        columns, rows = fit(tuple(size), side, pixels.max_patches)
    elif pixels.crop_to_patches:
        fit = _class("ovis2.image_processing_pil_ovis2", "get_optimal_tiled_canvas")
        columns, rows = fit(tuple(size), (side, side), pixels.min_patches, pixels.max_patches)
    found = {"grids": np.array([[rows, columns]])}
    text = processor.replace_image_token(found, 0)
    return {"num_image_tokens": [len(processor.tokenizer(text)["input_ids"])]}


def phi4_tokens(processor: Any, size: ImageSize) -> dict[str, list[int]]:
    """Phi4MultimodalProcessor, nor does it, for a picture of no pixels."""
    picture = torch.zeros((1, 1, 1), dtype=torch.uint8).expand(3, *size)
    pixels, side = processor.image_processor, processor.image_processor.size["height"]
    patches = side // pixels.patch_size
    module = sys.modules[type(pixels).__mro__[1].__module__]
    functional, held = (
        module.tvF,
        SimpleNamespace(resize=_enlarge, pad=lambda image, *_, **__: image),
    )
    vars(module)["tvF"] = held  # which makes no pixels
    try:
        given = (side, pixels.patch_size, patches)
        _, mask = pixels.dynamic_preprocess(picture, *given, max_num=pixels.dynamic_hd)
    finally:
        vars(module)["tvF"] = functional
    read = mask[::2, ::2]
    return {"num_image_tokens": [256 + 1 + int(read.sum()) + int(read[:, 0].sum()) + 16]}


def _enlarge(image: torch.Tensor, size: list[int]) -> torch.Tensor:
    return image[:, :1, :1].expand(3, *size)


def paddle_tokens(processor: Any, size: ImageSize) -> dict[str, list[int]]:
    """PaddleOCRVLProcessor, nor does it, by its image processor, which does."""
    patches = processor.image_processor.get_number_of_image_patches(*size)
    return {"num_image_tokens": [patches // processor.image_processor.merge_size**2]}


def minicpm_tokens(processor: Any, size: ImageSize) -> dict[str, list[int]]:
    """MiniCPMV4_6Processor and MiniCPMOcrProcessor, nor do they, for pixels of nothing."""
    pixels = processor.image_processor
    names = ("scale_resolution", "patch_size", "downsample_mode")
    given = {name: getattr(pixels, name) for name in names}
    bounds = (pixels.max_slice_nums, pixels.scale_resolution)
    grid = pixels.get_sliced_grid(size, *bounds) if pixels.slice_mode else None
    sizes = [pixels.find_best_resize(size, **given, allow_upscale=grid is None)]
    if grid is not None:
        height, width = pixels.get_refine_size(size, grid, **given, allow_upscale=True)
        sizes += [(height // grid[0], width // grid[1])] * (grid[0] * grid[1])
    found = {
        "grids": [grid or (0, 0)],
        "num_patches_per_image": [len(sizes)],
        "target_sizes": np.array(sizes) // pixels.patch_size,
    }
    divisor = processor.image_token_divisor
    text = processor.replace_image_token(found, 0, image_token_divisor=divisor)
    return {"num_image_tokens": [len(processor.tokenizer(text)["input_ids"])]}


def deepseek_ocr_tokens(processor: Any, size: ImageSize) -> dict[str, list[int]]:
    """DeepseekOcr2Processor and UnlimitedOcrProcessor, nor do they."""
    pixels, (height, width) = processor.image_processor, size
    longest, shortest = max(size), min(size)
    if not round(shortest * (pixels.size["height"] / longest)):
        raise ValueError("an image of no features")
    columns, rows, count = 1, 1, 0
    if longest > pixels.tile_size:
        fit = _class("deepseek_ocr2.image_processing_pil_deepseek_ocr2", "get_optimal_tiled_canvas")
        tile = (pixels.tile_size, pixels.tile_size)
        told = {"min_patches": pixels.min_patches, "max_patches": pixels.max_patches}
        told |= getattr(processor, "images_kwargs", {})  # its own come first
        columns, rows = fit((height, width), tile, told["min_patches"], told["max_patches"])
        count = columns * rows
    found = {"num_local_patches": [count], "patches_grid": [[columns, rows]]}
    text = processor.replace_image_token(found, 0)
    return {"num_image_tokens": [text.count(processor.image_token)]}


class GotOcr:
    """GotOcr2Processor, which takes images as a list of them."""

    def __init__(self, processor: Any) -> None:
        self.tokenizer = processor.tokenizer
        self._processor = processor

    def __call__(self, text: str, images: list[list[Any]], return_tensors: None) -> Any:
        return self._processor(text=text, images=images[0])


def nemotron_tokens(processor: Any, size: ImageSize) -> dict[str, list[int]]:
    """NemotronH_Omni_Reasoning_V3Processor, nor does it."""
    pixels = processor.image_processor
    merge = round(1 / pixels.downsample_ratio)
    fit = sys.modules[type(pixels).__mro__[1].__module__].get_patch_grid_size
    grid = fit(*size, pixels.patch_size, merge, pixels.min_num_patches, pixels.max_num_patches)
    text = processor.replace_image_token({"image_grid_hw": torch.tensor([grid])}, 0)
    return {"num_image_tokens": [len(processor.tokenizer(text)["input_ids"])]}


# Of families whose processors do not tell, by the beginnings of their names.
COUNTS: dict[str, Callable[[Any, ImageSize], dict[str, list[int]]]] = {
    "deepseek_ocr2": deepseek_ocr_tokens,
    "unlimited_ocr": deepseek_ocr_tokens,
    "lfm2_vl": lfm2_tokens,
    "llama4": llama4_tokens,
    "minicpm_ocr": minicpm_tokens,
    "minicpmv4_6": minicpm_tokens,
    "minicpmv4_7": minicpm_tokens,
    "nemotron_h_omni": nemotron_tokens,
    "ovis2": ovis_tokens,
    "paddleocr_vl": paddle_tokens,
    "phi4_multimodal": phi4_tokens,
    "step3p7": step_tokens,
}


@cache
def theirs(name: str) -> Any:
    """The family's processor, with a tokenizer that knows its marks and next to nothing else."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    family = FAMILIES[name]
    marks = [
        "<unk>", "<bos>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
        "[IMG_BREAK]", "[IMG_END]", *family.tokens.values(),
        *(f"<row_{row}_col_{column}>" for row in range(1, 9) for column in range(1, 9)),
    ]  # fmt: skip
    vocabulary = {word: place for place, word in enumerate([*marks, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(r"\n\n|\n| |[a-zA-Z]+", "isolated")
    tokenizer.add_special_tokens(marks)
    known = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        unk_token="<unk>",
        pad_token="<unk>",
        extra_special_tokens={**family.tokens, "image_boundary_token": marks[2]},
    )
    if family.image_processor.endswith("Pil"):
        file = f"{family.module}.image_processing_pil_{family.module}"
        pixels = _class(file, family.image_processor)
    elif family.image_processor in INHERITED:
        pixels = partial(inherited_processor, family.module, family.image_processor)
    else:
        pixels = partial(TorchProcessor, family.module, family.image_processor)
    if family.processor == "PixtralProcessor":
        return Pixtral(pixels(**family.pixels), known, **family.options)
    module = WHOLES.get(family.processor, family.module)
    extra: dict[str, Any] = {"video_processor": None} if module in VIDEOS else {}
    if module.startswith("minicpm"):
        extra["video_processor"] = SimpleNamespace(slice_mode=False, downsample_mode="16x")
    if module == "phi4_multimodal":
        extra["audio_processor"] = None
    if module.startswith(("gemma3n", "gemma4", "nemotron", "qwen2_5_omni")):
        extra["feature_extractor"] = None
    whole = _class(f"{module}.processing_{module}", family.processor)
    whole.check_argument_for_proper_class = lambda self, name, value: type(value)
    made = whole(
        image_processor=pixels(**family.pixels), tokenizer=known, **family.options, **extra
    )
    wrapped = {"idefics": Idefics, "GotOcr2Processor": GotOcr}
    return wrapped.get(module, wrapped.get(family.processor, lambda one: one))(made)


def _class(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"transformers.models.{module}"), name)
