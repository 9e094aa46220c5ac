"""Images of noise for every family that reads them, as the shard and transformers get them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tgi_trio.testing.checkpoints import VOCAB_SIZE

IMAGE_TOKEN = 100
TILED = ("aya_vision", "cohere2_vision", "internvl", "llama4", "qianfan_ocr")
WHOLE = ("deepseek_vl", "gemma3", "llava", "paligemma", "vipllava")  # one of a size
GEMMA4 = ("gemma4", "gemma4_unified")
MINICPM = ("minicpm_ocr", "minicpmv4_6", "minicpmv4_7")
TIMM = ("fast_vlm", "gemma3n", "perception_lm")  # whose towers are of the package timm
END = 1  # id of the end of a text
GLM = ("glm46v", "glm4v", "glm4v_moe", "glm5_next", "glm_ocr", "glmga")
CAUSAL = (
    *TILED,
    "deepseek_ocr2",
    "deepseek_vl",
    "deepseek_vl_hybrid",
    *TIMM,
    "exaone4_5",
    "got_ocr2",
    "granite_docling",
    "granite4_vision",
    "hyperclovax_vision_v2",
    "kimi_k25",
    "lfm3_vl",
    "lighton_ocr",
    "vipllava",
    "llava_next_video",
    "idefics2",
    "idefics3",
    "llava",
    "llava_next",
    "llava_onevision",
    *MINICPM,
    "minimax_m3_vl",
    "mistral3",
    "mistral_large4",
    "muse_glimmer",
    "nemotron_h_omni",
    "ovis2",
    "pixtral",
    "smolvlm",
    "step3p7",
    "unlimited_ocr",
)
HYBRIDS = ("qwen3_5", "qwen3_5_moe", "qwen4_exp")
DELTA_RULES = (*HYBRIDS, "glm5_next", *MINICPM)
BY_PIXEL = ("lfm2_vl",)  # whose patches are pixel by pixel
QWEN = ("cohere_compass", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", *HYBRIDS)
GRIDS = (*GLM, "hunyuan_vl", *QWEN, "paddleocr_vl")
CROSSED = ("idefics", "mllama")  # whose layers attend to images
FAMILIES = (*CAUSAL, *BY_PIXEL, "gemma3", *GEMMA4, "paligemma", *GRIDS, *CROSSED)
PROCESSOR = {
    **{"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True},
    **{"image_mean": [0.48, 0.45, 0.40], "image_std": [0.26, 0.27, 0.28]},
    **{"high_res_image_mean": [0.4, 0.5, 0.6], "high_res_image_std": [0.3, 0.2, 0.1]},
}
RESCALED = {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": False}


@dataclass(frozen=True)
class Picture:
    """An image as the shard gets it, and how many features it has."""

    bundle: dict[str, NDArray[Any]]
    features: int
    # Ids of marks that have features as well, by their places among the features.
    marks: Mapping[int, int] = field(default_factory=dict)
    written: tuple[int, ...] = ()  # its ids where there are others between those of features

    @property
    def ids(self) -> list[int]:
        """Its ids: those in whose places its features stand, unless others are `written`."""
        featured = [self.marks.get(i, IMAGE_TOKEN) for i in range(self.features)]
        return list(self.written) or featured

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Runs of its features among its ids: place of the first, and their number."""
        if not self.written:
            return [(0, self.features)]
        places = enumerate(self.written)
        kinds = groupby(places, key=lambda pair: pair[1] == IMAGE_TOKEN)
        runs = [list(run) for featured, run in kinds if featured]
        return [(run[0][0], len(run)) for run in runs]

    @property
    def key(self) -> bytes:
        parts = (name.encode() + array.tobytes() for name, array in self.bundle.items())
        return hashlib.sha256(b"".join(parts)).digest()


# The numbers of a patch of families whose image is a grid of them: most have two frames.
PATCHES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys((*GRIDS, "exaone4_5", "hyperclovax_vision_v2", "lfm3_vl"), (2 * 3 * 16,)),
    **dict.fromkeys(("minimax_m3_vl", "muse_glimmer"), (2 * 3 * 64,)),
    **dict.fromkeys(("kimi_k25", "paddleocr_vl"), (3, 4, 4)),
    "hunyuan_vl": (3 * 4 * 4,),
}


Pixels = Callable[..., NDArray[np.uint8]]  # of a shape: noise


def picture(family: str, seed: int, beside: bool = False) -> Picture:
    """Return an image of noise; all of a family are of one size.

    `beside`: as of a prompt with several, where a family sees these otherwise.
    """
    draw = np.random.default_rng(seed)

    def pixels(*shape: int) -> NDArray[np.uint8]:
        return draw.integers(0, 256, shape, np.uint8)

    used = 2 - seed % 2
    return (
        _whole(family, pixels)
        or _of_tiles(family, pixels, used, beside=beside)
        or _of_patches(family, pixels)
    )


def _whole(family: str, pixels: Pixels) -> Picture | None:
    """Return an image that is scaled to one size, or None: the family sees others."""
    match family:
        case _ if family in WHOLE:
            return Picture({"pixel_values": pixels(1, 3, 16, 16)}, 4)
        case "deepseek_vl_hybrid":
            larger = pixels(1, 3, 32, 32)
            both = {"pixel_values": pixels(1, 3, 16, 16), "high_res_pixel_values": larger}
            return Picture(both, 4)
        case "fast_vlm":
            return Picture({"pixel_values": pixels(1, 3, 128, 128)}, 4)
        case "gemma3n":  # and the mark behind it
            return Picture({"pixel_values": pixels(1, 3, 32, 32)}, 5, {4: VOCAB_SIZE - 4})
        case "idefics":
            return Picture({"pixel_values": pixels(1, 3, 16, 16)}, 1)
        case _:
            return None


def _of_tiles(family: str, pixels: Pixels, used: int, *, beside: bool) -> Picture | None:
    """Return an image that is cut into tiles, or None. `used`: of Llama's two, those it fills."""
    match family:
        case _ if family in TILED:  # two tiles, and the whole
            return Picture({"pixel_values": pixels(3, 3, 16, 16)}, 3)
        case "got_ocr2":  # two tiles, and the whole
            return Picture({"pixel_values": pixels(3, 3, 64, 64)}, 3 * 4)
        case "deepseek_ocr2":  # the whole, which has the queries of a tile, and a mark behind it
            return Picture({"pixel_values": pixels(1, 3, 64, 64)}, 144 + 1)
        case "unlimited_ocr":  # two rows of a tile, the whole, each row with a mark, and one more
            told = {"num_local_patches": np.array([2]), "grids": np.array([[2, 1]])}
            tiles = pixels(2, 3, 64, 64)
            views = {"pixel_values": pixels(1, 3, 128, 128), "pixel_values_local": tiles}
            return Picture({**views, **told}, 4 + 6 + 1)
        case "granite_docling":  # two tiles, and the whole
            mask, tiles = np.ones((1, 3)), pixels(1, 3, 3, 16, 16)
            return Picture({"pixel_values": tiles, "pixel_attention_mask": mask}, 3 * 4)
        case "perception_lm":  # the whole, and two tiles
            return Picture({"pixel_values": pixels(1, 3, 3, 16, 16)}, 3 * 4)
        case "ovis2":  # the whole, and two rows of two tiles
            begin, behind, column, row, end = range(VOCAB_SIZE - 5, VOCAB_SIZE)
            marks = {0: begin, 5: behind, 10: column, 15: row, 20: column, 25: end}
            shape = np.array([[2, 2]])
            return Picture({"pixel_values": pixels(5, 3, 16, 16), "grids": shape}, 26, marks)
        case "llava_next" | "llava_next_video" | "granite4_vision":
            # A whole and two halves, and what parts their rows.
            sizes = np.array([[14, 30]])
            bundle = {"pixel_values": pixels(1, 3, 3, 16, 16), "image_sizes": sizes}
            return Picture(bundle, 4 + 8 + 2)
        case "llava_onevision":  # alone as LLaVA-NeXT, and shrunk; `beside` others, the whole
            sizes, count = np.array([[14, 30]]), np.array([2 if beside else 1])
            parts = {"image_sizes": sizes, "batch_num_images": count}
            patches = pixels(1, 1 if beside else 3, 3, 16, 16)
            return Picture({"pixel_values": patches, **parts}, 4 + 1 if beside else 4 + 2 + 1)
        case "idefics2":
            mask = np.ones((1, 1, 16, 16))
            return Picture(
                {"pixel_values": pixels(1, 1, 3, 16, 16), "pixel_attention_mask": mask}, 2
            )
        case "idefics3" | "smolvlm":  # three tiles
            mask = np.ones((1, 3, 16, 16))
            return Picture(
                {"pixel_values": pixels(1, 3, 3, 16, 16), "pixel_attention_mask": mask}, 3
            )
        case "mllama":  # two tiles, one of them of nothing
            tiles = np.zeros((1, 1, 2, 3, 16, 16), np.uint8)
            tiles[:, :, :used] = pixels(1, 1, used, 3, 16, 16)
            mask = (np.arange(2) < used)[None, None].astype(np.uint8)
            shape = np.array([[used]])  # of the shapes that there are, counted from one
            bundle = {"pixel_values": tiles, "aspect_ratio_ids": shape, "aspect_ratio_mask": mask}
            return Picture({**bundle, "num_tiles": shape}, 1)
        case "step3p7":  # the whole, and two windows
            count = np.array([2])
            windows = {"pixel_values_local": pixels(2, 3, 16, 16), "num_local_patches": count}
            return Picture({"pixel_values": pixels(1, 3, 32, 32), **windows}, 4 + 2)
        case _:
            return None


def _of_patches(family: str, pixels: Pixels) -> Picture:
    """Return an image that is as large as it comes, in patches."""
    match family:
        case "gemma4":  # patches of all channels, pooled two by two, and some of nothing
            places = np.stack(np.meshgrid(np.arange(6), np.arange(4)), axis=-1).reshape(24, 2)
            places = np.concatenate((places, np.full((8, 2), -1)))[None]
            patches = pixels(1, 32, 48)
            patches[:, 24:] = 0
            return Picture({"pixel_values": patches, "image_position_ids": places}, 6)
        case "gemma4_unified":
            corners = np.array([[[0, 0], [1, 0], [0, 1], [1, 1]]])
            patches = pixels(1, 4, 8 * 8 * 3)
            return Picture({"pixel_values": patches, "image_position_ids": corners}, 4)
        case "minicpmv4_7":  # the whole and two rows of a slice, between marks
            sizes, own = np.array([[4, 12], [8, 4], [8, 4]]), [IMAGE_TOKEN] * 2
            written = (501, *own, IMAGE_TOKEN, 502, 503, *own, 504, 505, 503, *own, 504)
            bundle = {"pixel_values": pixels(1, 3, 4, 112 * 4), "target_sizes": sizes}
            return Picture(bundle, 7, written=written)
        case _ if family in MINICPM:  # the whole and a slice, by rows of all their patches
            sizes = np.array([[4, 8], [8, 4]])
            features = 2 * 32 // (4 if family == "minicpm_ocr" else 16)
            return Picture(
                {"pixel_values": pixels(1, 3, 4, 64 * 4), "target_sizes": sizes}, features
            )
        case "lfm2_vl":  # two tiles and the whole, which has more patches
            shapes = np.array([[4, 4], [4, 4], [4, 6]])
            mask = np.arange(24) < shapes.prod(axis=1)[:, None]
            patches = pixels(3, 24, 4 * 4 * 3) * mask[:, :, None]
            parts = {"pixel_attention_mask": mask.astype(np.uint8), "spatial_shapes": shapes}
            return Picture({"pixel_values": patches, **parts}, 4 + 4 + 6)
        case _ if family in PATCHES:  # merged two by two
            grid = np.array([[1, 4, 6]])
            bundle = {"pixel_values": pixels(24, *PATCHES[family]), "image_grid_thw": grid}
            return Picture(bundle, 2 * (3 + 1) + 2 if family == "hunyuan_vl" else 6)
        case "nemotron_h_omni":
            grid = np.array([[4, 6]])
            return Picture({"pixel_values": pixels(24, 3 * 16), "image_grid_hw": grid}, 6)
        case "pixtral":
            sizes = np.array([[16, 24]])
            return Picture({"pixel_values": pixels(1, 3, 16, 24), "image_sizes": sizes}, 6)
        case _:  # Mistral's: patches are merged, two by two
            sizes = np.array([[32, 16]])
            return Picture({"pixel_values": pixels(1, 3, 32, 16), "image_sizes": sizes}, 2)


@dataclass(frozen=True)
class Prompt:
    """Ids and images; an image's tokens have the ids of its picture."""

    ids: list[int]
    pictures: tuple[Picture, ...]

    @classmethod
    def of(cls, *parts: int | Picture) -> Prompt:
        """Make a prompt of ids and images in turn."""
        ids: list[int] = []
        for part in parts:
            ids += part.ids if isinstance(part, Picture) else [part]
        return cls(ids, tuple(part for part in parts if isinstance(part, Picture)))


def together(pictures: Sequence[Picture], family: str = "") -> dict[str, Any]:
    """Return what transformers is given for the images of one prompt."""
    found: dict[str, Any] = {}
    names = pictures[0].bundle.keys()
    by_pixel = "spatial_shapes" in names
    # One prompt, many tiles.
    tiles = not {"pixel_attention_mask", "aspect_ratio_mask"}.isdisjoint(names) and not by_pixel
    for name in pictures[0].bundle:
        if name == "grids":  # of which its text tells
            continue
        if name == "batch_num_images":  # of the prompt
            found[name] = torch.tensor([len(pictures)])
            continue
        axis = -1 if name == "pixel_values" and family in MINICPM else int(tiles)
        whole = np.concatenate([each.bundle[name] for each in pictures], axis=axis)
        if name == "pixel_values" and "image_position_ids" in pictures[0].bundle:
            found[name] = torch.from_numpy(whole.astype(np.float32) * np.float32(1 / 255))
        elif name == "pixel_values" and family == "llama4":  # normalised in bfloat16
            numbers = [torch.tensor(PROCESSOR[f"image_{what}"]) for what in ("mean", "std")]
            centre, spread = (each.bfloat16()[:, None, None] for each in numbers)
            pixels = torch.from_numpy(whole).bfloat16() * (1 / 255)
            found[name] = ((pixels - centre) / spread).float()
        elif name in ("pixel_values", "pixel_values_local", "high_res_pixel_values"):
            prefix = "high_res_" if name.startswith("high_res_") else ""
            frames = 2 if family == "muse_glimmer" else 1  # apart, each with its channels
            channels = whole.reshape(-1, frames, 3, whole[0].size // 3 // frames, 1)
            channels = channels if whole.ndim == 2 else whole
            mean, deviation = (
                np.array(PROCESSOR[f"{prefix}image_{what}"], np.float32)[:, None, None]
                for what in ("mean", "std")
            )
            if by_pixel:
                channels = whole.reshape(*whole.shape[:2], -1, 3)
                mean, deviation = mean.reshape(3), deviation.reshape(3)
            channels = (channels.astype(np.float32) * np.float32(1 / 255) - mean) / deviation
            found[name] = torch.from_numpy(channels.astype(np.float32).reshape(whole.shape))
        else:
            found[name] = torch.from_numpy(whole.astype(np.int64))
    if family == "granite_docling":  # which picks tiles by it
        found["pixel_attention_mask"] = found["pixel_attention_mask"].bool()
    if family == "unlimited_ocr":  # which wants lists
        found["num_local_patches"] = found["num_local_patches"].tolist()
        found["patches_grid"] = [each.bundle["grids"][0, ::-1].tolist() for each in pictures]
    if "aspect_ratio_mask" in found:
        found["pixel_values"] *= found["aspect_ratio_mask"][..., None, None, None]
        del found["num_tiles"]
    return found


def shown(prompt: Prompt, more: int) -> torch.Tensor:
    """Return which tiles the tokens of a prompt see, and `more` behind them, as the processor of
    Llama 3.2 Vision says.
    """
    from transformers.models.mllama import processing_mllama as theirs

    ids, counts = prompt.ids, [each.bundle["num_tiles"].item() for each in prompt.pictures]
    spans = theirs.get_cross_attention_token_mask(ids, IMAGE_TOKEN)
    mask = theirs.convert_sparse_cross_attention_mask_to_dense([spans], [counts], 2, len(ids))
    found = torch.from_numpy(mask)
    return torch.cat((found, found[:, -1:].expand(-1, more, -1, -1)), dim=1)


def shown_apart(prompt: Prompt, more: int) -> torch.Tensor:
    """Return which images the tokens of a prompt see, and `more` behind them, as the processor of
    Idefics 1 says.
    """
    from transformers.models.idefics import processing_idefics as theirs

    tokenizer = SimpleNamespace(convert_tokens_to_ids=lambda _: IMAGE_TOKEN, eos_token_id=END)
    ids = torch.tensor([prompt.ids])
    which, _ = theirs.image_attention_mask_for_packed_input_ids(ids, tokenizer, "pt")
    count = len(prompt.pictures)
    found = theirs.incremental_to_binary_attention_mask(which, "pt", num_classes=count)
    return torch.cat((found, found[:, -1:].expand(-1, more, -1)), dim=1)
