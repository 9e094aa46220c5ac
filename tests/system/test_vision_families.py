"""Families whose prompts or pixels are made in ways of their own, behind whole servers.

The oracle is transformers: its processor's ids and pixels, and its model's greedy tokens.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from PIL import Image

from tests.router.media.image_files import noise
from tests.router.media.ocr_families import HUNYUAN
from tests.router.media.torchvision_processors import inherited_processor
from tests.shard.media.hunyuan_models import turn_in_pairs
from tests.system import image_support
from tests.system.image_support import interleave, told
from tests.system.server import serving
from tgi_trio.testing.checkpoints import VOCAB_SIZE
from tgi_trio.testing.wrapped_checkpoints import make_wrapped

pytestmark = [pytest.mark.system, pytest.mark.thorough]

MOST = 8  # tokens of an answer
TEXTS = ["Look: ", " and then ", " so?"]
NORMAL: dict[str, Any] = {
    **{"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True},
    **{"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.4, 0.5]},
}
PLAIN = NORMAL | {"do_normalize": False}
QWEN = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
CUT = {"patch_size": 4, "scale_resolution": 24, "max_slice_nums": 4}


@dataclass(frozen=True)
class Seen:
    """A family: its processor's module and name, and those of its image processor."""

    processor: tuple[str, str]
    pixels: tuple[str, str]
    settings: dict[str, Any]  # of the image processor
    tokens: dict[str, str]  # the image's first
    around: tuple[str, str] = ("", "")
    options: dict[str, Any] = field(default_factory=dict)  # of the processor
    text: dict[str, Any] = field(default_factory=dict)  # options of the text model
    sizes: tuple[tuple[int, int], tuple[int, int]] = ((24, 40), (40, 17))  # of two pictures
    ids: dict[str, str | list[str]] = field(default_factory=dict)  # tokens that config.json names
    asked: dict[str, Any] = field(default_factory=dict)  # of the processor, with every prompt

    @property
    def pictures(self) -> list[Image.Image]:
        return [noise(*size, seed=i) for i, size in enumerate(self.sizes)]


MINICPM = {
    **QWEN,
    **{"image_start_token": "<image>", "image_end_token": "</image>"},
    **{"slice_start_token": "<slice>", "slice_end_token": "</slice>"},
    **{"image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>"},
}
GEMMA4 = {
    **{"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"},
    **{"audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"},
}
QWEN_PIXELS = NORMAL | {"patch_size": 4, "min_pixels": 64, "max_pixels": 1024}
FAMILIES = {
    "deepseek_vl_hybrid": Seen(
        ("deepseek_vl_hybrid", "DeepseekVLHybridProcessor"),
        ("deepseek_vl_hybrid", "DeepseekVLHybridImageProcessorPil"),
        NORMAL
        | {
            **{"size": {"height": 16, "width": 16}, "high_res_size": {"height": 32, "width": 32}},
            **{"high_res_image_mean": [0.4, 0.5, 0.6], "high_res_image_std": [0.3, 0.2, 0.1]},
        },
        {"image_token": "<image_placeholder>"},
        options={"num_image_tokens": 4},
    ),
    "exaone4_5": Seen(
        ("exaone4_5", "Exaone4_5_Processor"),
        ("qwen2_vl", "Qwen2VLImageProcessorPil"),
        QWEN_PIXELS,
        {**QWEN, "begin": "<vision>", "end": "</vision>"},
        around=("<vision>", "</vision>"),
    ),
    "gemma4_unified": Seen(
        ("gemma4_unified", "Gemma4UnifiedProcessor"),
        ("gemma4_unified", "Gemma4Unified"),
        PLAIN | {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70},
        GEMMA4,
        text={"sliding_window": 96},  # at least an image
        sizes=((56, 80), (80, 56)),  # which need no resampling, of which there are two ways
    ),
    "hunyuan_vl": Seen(
        ("hunyuan_vl", "HunYuanVLProcessor"),
        ("hunyuan_vl", "HunYuanVLImageProcessorPil"),
        QWEN_PIXELS,
        HUNYUAN,
        around=(HUNYUAN["image_start_token"], HUNYUAN["image_end_token"]),
        asked={"add_special_tokens": True},  # which it takes to be the chat template's
    ),
    "hyperclovax_vision_v2": Seen(
        ("hyperclovax_vision_v2", "HyperCLOVAXVisionV2Processor"),
        ("qwen2_vl", "Qwen2VLImageProcessorPil"),
        QWEN_PIXELS,
        {
            **{"image_token": "<|IMAGE_PAD|>", "video_token": "<|VIDEO_PAD|>"},
            **{"begin": "<|image_start|>", "end": "<|image_end|>"},
        },
        around=("<|image_start|>", "<|image_end|>"),
    ),
    "llava_onevision": Seen(
        ("llava_onevision", "LlavaOnevisionProcessor"),
        ("llava_onevision", "LlavaOnevisionImageProcessorPil"),
        NORMAL
        | {
            "size": {"height": 16, "width": 16},
            "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]],
        },
        {"image_token": "<image>", "video_token": "<video>"},
        options={
            **{"num_image_tokens": 4, "vision_feature_select_strategy": "full"},
            "vision_aspect_ratio": "anyres_max_1",
        },
    ),
    "minicpm_ocr": Seen(
        ("minicpm_ocr", "MiniCPMOcrProcessor"), ("minicpm_ocr", "MiniCPMOcr"), PLAIN | CUT, MINICPM
    ),
    "minicpmv4_6": Seen(
        ("minicpmv4_6", "MiniCPMV4_6Processor"),
        ("minicpmv4_6", "MiniCPMV4_6ImageProcessorPil"),
        NORMAL | CUT,
        MINICPM,
    ),
    "minicpmv4_7": Seen(
        ("minicpmv4_7", "MiniCPMV4_7Processor"),
        ("minicpmv4_6", "MiniCPMV4_6ImageProcessorPil"),
        NORMAL | CUT,
        MINICPM,
        ids={
            **{"image_start_id": "<image>", "image_end_id": "</image>", "newline_id": "\n"},
            **{"slice_start_id": "<slice>", "slice_end_id": "</slice>"},
        },
    ),
    "ovis2": Seen(
        ("ovis2", "Ovis2Processor"),
        ("ovis2", "Ovis2ImageProcessorPil"),
        NORMAL | {"size": {"height": 16, "width": 16}, "crop_to_patches": True, "max_patches": 4},
        {
            **{"image_token": "<image>", "atom": "<IMG_ATOM>", "begin": "<IMG_START>"},
            **{"grid": "<IMG_GRID>", "column": "<IMG_COL>", "row": "<IMG_ROW>", "end": "<IMG_END>"},
        },
        options={"image_seq_length": 4},
        ids={
            "image_token_id": "<IMG_ATOM>",
            "visual_indicator_token_ids": [
                *("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"),
            ],
        },
    ),
    "paddleocr_vl": Seen(
        ("paddleocr_vl", "PaddleOCRVLProcessor"),
        ("paddleocr_vl", "PaddleOCRVLImageProcessorPil"),
        QWEN_PIXELS,
        {
            "image_token": "<|IMAGE_PLACEHOLDER|>",
            **{"begin": "<|IMAGE_START|>", "end": "<|IMAGE_END|>"},
        },
        around=("<|IMAGE_START|>", "<|IMAGE_END|>"),
    ),
}


def make_folder(folder: Path, family: str) -> Path:
    """Write a random model, with a tokenizer that knows the tokens of its images."""
    seen = FAMILIES[family]
    size = VOCAB_SIZE + len(seen.tokens)
    make_wrapped(folder, family, image_token=VOCAB_SIZE, vocab_size=size, **seen.text)
    file = str(folder / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(file)
    tokenizer.add_special_tokens(list(seen.tokens.values()))
    assert tokenizer.token_to_id(seen.tokens["image_token"]) == VOCAB_SIZE
    tokenizer.save(file)
    config = json.loads((folder / "config.json").read_text())
    for name, tokens in seen.ids.items():
        ids = [
            tokenizer.encode(t).ids[-1] for t in ([tokens] if isinstance(tokens, str) else tokens)
        ]
        config[name] = ids[0] if isinstance(tokens, str) else ids
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(seen.settings))
    (folder / "processor_config.json").write_text(json.dumps(seen.options))
    return folder


def load_processor(folder: Path, seen: Seen) -> Any:
    """Return transformers' own processor of a folder."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        **{"bos_token": "<s>", "pad_token": "</s>", "extra_special_tokens": seen.tokens},
    )
    module, name = seen.pixels
    if name.endswith("Pil"):
        pixels = _class(f"{module}.image_processing_pil_{module}", name)(**seen.settings)
    else:
        sizes = {key: value for key, value in seen.settings.items() if key not in NORMAL}
        pixels = inherited_processor(module, name, **sizes)
        pixels.do_rescale, pixels.rescale_factor = True, seen.settings["rescale_factor"]
    module, name = seen.processor
    extra: dict[str, Any] = {"video_processor": None}
    if module.startswith("minicpm"):
        extra["video_processor"] = SimpleNamespace(slice_mode=False, downsample_mode="16x")
    elif module == "gemma4_unified":
        extra["feature_extractor"] = None
    elif module in ("deepseek_vl_hybrid", "hunyuan_vl", "ovis2", "paddleocr_vl"):
        del extra["video_processor"]
    whole = _class(f"{module}.processing_{module}", name)
    whole.check_argument_for_proper_class = lambda self, name, value: type(value)
    return whole(image_processor=pixels, tokenizer=tokenizer, **seen.options, **extra)


def _class(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"transformers.models.{module}"), name)


def expected(folder: Path, seen: Seen, model: Any, count: int) -> tuple[list[int], list[int]]:
    """Return transformers' ids of a prompt with so many pictures, and its greedy tokens."""
    before, after = seen.around
    mark = f"{before}{seen.tokens['image_token']}{after}"
    processor = load_processor(folder, seen)
    text = interleave(TEXTS, [mark] * count)
    images = [seen.pictures[:count]]
    inputs = processor(text=[text], images=images, return_tensors="pt", **seen.asked)
    found = model.generate(**inputs, max_new_tokens=MOST, do_sample=False, pad_token_id=2)
    ids = inputs["input_ids"][0].tolist()
    return ids, found[0, len(ids) :].tolist()


@pytest.mark.parametrize(
    ("family", "options"),
    [*((family, ()) for family in sorted(FAMILIES)), ("hunyuan_vl", ("--num-shard", "2"))],
    ids=lambda value: value if isinstance(value, str) else "ranks" if value else "alone",
)
def test_ids_and_tokens_are_those_of_transformers(
    tmp_path: Path, family: str, options: tuple[str, ...]
) -> None:
    import torch
    from transformers import AutoModelForImageTextToText

    seen, folder = FAMILIES[family], make_folder(tmp_path, family)
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    if family == "hunyuan_vl":
        turn_in_pairs(model)
    with serving("--model-id", str(folder), "--dtype", "float32", *options) as server:
        for count in (1, 2):
            details = image_support.ask(server, TEXTS, seen.pictures[:count], max_new_tokens=MOST)
            ids, tokens = expected(folder, seen, model, count)
            assert [token["id"] for token in details["prefill"]] == ids
            said = told(details)
            assert said == tokens[: len(said)] and (len(said) == MOST or said[-1] == 1)
