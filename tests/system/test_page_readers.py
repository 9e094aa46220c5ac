"""Models that read pages behind whole servers: ids and tokens of transformers.

DeepSeek-OCR is as it is published, with one config.json for all and no template; the oracle reads
the same weights by transformers' class of another type.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from PIL import Image

from tests.router.media.image_files import noise
from tests.router.media.layout_family import INTERNVL
from tests.shard.media.deepseek_ocr_models import make_deepseek_ocr
from tests.system.server import serving
from tests.system.test_videos import MOST, ask
from tgi_trio.testing.checkpoints import VOCAB_SIZE
from tgi_trio.testing.wrapped_checkpoints import make_wrapped

pytestmark = pytest.mark.system

BARE: dict[str, Any] = {"add_special_tokens": False}
HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
FLAGS = ("--dtype", "float32", "--max-input-tokens", "1900", "--max-total-tokens", "2000")


def know(folder: Path, *tokens: str, template: str = "") -> Any:
    """Have a folder's tokenizer know these, and return it as transformers has it."""
    from transformers import PreTrainedTokenizerFast

    file = str(folder / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(file)
    tokenizer.add_special_tokens(list(tokens))
    tokenizer.save(file)
    told = json.loads((folder / "tokenizer_config.json").read_text())
    told |= {"chat_template": template} if template else {}
    if not template:
        told.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(told | {"add_bos_token": False}))
    named = {"bos_token": "<s>", "pad_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_file=file, **named)


def load(folder: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


def say(model: Any, ids: torch.Tensor, **given: Any) -> tuple[list[int], list[int]]:
    """Return ids, and the greedy tokens behind them."""
    found = model.generate(
        **{"input_ids": ids, "attention_mask": torch.ones_like(ids), **given},
        **{"do_sample": False, "pad_token_id": 2, "max_new_tokens": MOST},
    )
    return ids[0].tolist(), found[0, ids.shape[1] :].tolist()


def test_deepseek_ocr_as_it_is_published(tmp_path: Path) -> None:
    """A picture of no tiles, one of two, and both; over two ranks."""
    from transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2 import (
        DeepseekOcr2ImageProcessorPil,
    )
    from transformers.models.unlimited_ocr.processing_unlimited_ocr import UnlimitedOcrProcessor

    sizes = {"vocab_size": VOCAB_SIZE + 1, "max_position_embeddings": 2048}
    theirs, published = make_deepseek_ocr(
        tmp_path, "unlimited_ocr", all_windows=True, image_token=VOCAB_SIZE, **sizes
    )
    (published / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer = know(published, "<image>")
    model, kind, whole = load(theirs), DeepseekOcr2ImageProcessorPil, UnlimitedOcrProcessor
    made: Any = kind
    pixels = made(tile_size=640, max_patches=9, **HALF)
    processor: Any = whole.__new__(whole)
    processor.patch_size, processor.downsample_ratio = 16, 4
    processor.image_token, processor.image_processor = "<image>", pixels

    def expected(text: str, *shown: Image.Image) -> tuple[list[int], list[int]]:
        seen = pixels(list(shown), return_tensors=None)
        counts = seen["num_local_patches"]
        grids = [[1, count] if count == 2 else [1, 1] for count in counts]  # all of which are tall
        found = {"num_local_patches": counts, "patches_grid": grids}
        for i in range(len(shown)):
            marks = processor.replace_image_token(found, i).replace("<image>", "<mark>")
            text = text.replace("<image>", marks, 1)
        text = text.replace("<mark>", "<image>")
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        given: dict[str, Any] = {"pixel_values": torch.from_numpy(np.stack(seen["pixel_values"]))}
        if sum(counts):
            given["pixel_values_local"] = torch.from_numpy(np.stack(seen["pixel_values_local"]))
            given |= found
        return say(model, ids, **given)

    small, tall = noise(300, 500), noise(700, 350, seed=1)
    served = ("--model-id", str(published), *FLAGS, "--payload-limit", "10000000")
    with serving(*served, "--num-shard", "2") as server:
        assert ask(server, small, "Free OCR.") == expected("<s><image>\nFree OCR.", small)
        assert ask(server, tall, "Free OCR.") == expected("<s><image>\nFree OCR.", tall)
        both = expected("<s>So <image>\nand <image>\n?", small, tall)
        assert ask(server, "So ", small, "and ", tall, "?") == both


def test_got_ocr_without_a_template(tmp_path: Path) -> None:
    """What is asked of a page alone is its processor's own question."""
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
    from transformers.models.got_ocr2.processing_got_ocr2 import GotOcr2Processor

    marks = ("<imgpad>", "<img>", "</img>", "<|im_start|>", "<|im_end|>")
    folder = make_wrapped(
        tmp_path, "got_ocr2", image_token=VOCAB_SIZE, vocab_size=VOCAB_SIZE + len(marks)
    )
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer, model = know(folder, *marks), load(folder)
    size = {"size": {"height": 64, "width": 64}, "resample": 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(size | HALF))
    whole: Any = GotOcr2Processor
    whole.check_argument_for_proper_class = lambda self, name, value: type(value)
    made: Any = GotOcr2ImageProcessorPil
    processor = whole(made(**size, **HALF), tokenizer)
    page = noise(90, 70)
    inputs = processor(images=[page], num_image_tokens=4, return_tensors="pt", **BARE)
    wanted = say(model, inputs["input_ids"], pixel_values=inputs["pixel_values"])
    with serving("--model-id", str(folder), "--dtype", "float32", "--num-shard", "2") as server:
        assert ask(server, page) == ask(server, page, " OCR: ") == wanted


def test_qianfan_ocr_whose_placeholder_is_no_token(tmp_path: Path) -> None:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
    from transformers.models.qianfan_ocr.processing_qianfan_ocr import QianfanOCRProcessor

    template = (
        "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == "
        "'image' %}<image>\n{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
    )
    marks = ("<IMG_CONTEXT>", "<img>", "</img>")
    folder = make_wrapped(
        tmp_path, "qianfan_ocr", image_token=VOCAB_SIZE, vocab_size=VOCAB_SIZE + len(marks)
    )
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer, model = know(folder, *marks, template=template), load(folder)
    for name, token in INTERNVL.items():
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    size = {"size": {"height": 16, "width": 16}, "resample": 3, "max_patches": 6}
    (folder / "preprocessor_config.json").write_text(json.dumps(size | HALF))
    (folder / "processor_config.json").write_text(json.dumps({"image_seq_length": 1}))
    whole: Any = QianfanOCRProcessor
    whole.check_argument_for_proper_class = lambda self, name, value: type(value)
    made: Any = GotOcr2ImageProcessorPil
    processor = whole(made(**size, **HALF, crop_to_patches=True), tokenizer, image_seq_length=1)
    one, two = noise(16, 33), noise(50, 34, seed=2)
    text = "So <image>\nand <image>\n?"
    inputs = processor(text=text, images=[one, two], return_tensors="pt", **BARE)
    wanted = say(model, inputs["input_ids"], pixel_values=inputs["pixel_values"])
    with serving("--model-id", str(folder), "--dtype", "float32") as server:
        assert ask(server, "So ", one, "and ", two, "?") == wanted
