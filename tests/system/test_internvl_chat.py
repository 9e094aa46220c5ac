"""InternVL as it is published, behind whole servers: ids and tokens of transformers' class.

Its files are of their own kind (`tests/shard/media/internvl_models.py`): one config.json for all,
and a template of texts alone. The oracle reads the same weights as transformers writes them.
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
from tests.router.media.video_files import make_video, read_all
from tests.shard.media.internvl_models import make_internvl
from tests.system.server import serving
from tests.system.test_videos import MOST, ask
from tgi_trio.testing.checkpoints import VOCAB_SIZE

pytestmark = pytest.mark.system

SIDE = 16  # pixels, of tiles and of the tower
TOKENS = ("<IMG_CONTEXT>", "<img>", "</img>", "<|im_start|>", "<|im_end|>", "<video>")
# As the published files have it.
TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] +"
    " '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NORMAL: dict[str, Any] = {
    **{"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225], "resample": 3},
    **{"size": {"height": SIDE, "width": SIDE}, "min_patches": 1, "max_patches": 6},
}
# One tile, two in a row, six, and what is not of whole tiles.
PICTURES = [noise(16, 16), noise(16, 33, seed=1), noise(50, 34, seed=2), noise(7, 40, seed=3)]
VIDEO = make_video(frames=23, height=SIDE, width=SIDE)


def know(folder: Path) -> None:
    """Have a folder's tokenizer and template be of InternVL."""
    file = str(folder / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(file)
    tokenizer.add_special_tokens(list(TOKENS))
    tokenizer.save(file)
    told = json.loads((folder / "tokenizer_config.json").read_text())
    told |= {"chat_template": TEMPLATE, "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))


class Oracle:
    """transformers' processor and model of a folder of its own."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast
        from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import (
            GotOcr2ImageProcessorPil,
        )
        from transformers.models.internvl.processing_internvl import InternVLProcessor

        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"),
            **{"bos_token": "<s>", "pad_token": "</s>"},
            extra_special_tokens=INTERNVL,
        )
        kind: Any = InternVLProcessor
        kind.check_argument_for_proper_class = lambda self, name, value: type(value)
        pixels: Any = GotOcr2ImageProcessorPil(**NORMAL)
        self.processor = kind(pixels, tokenizer, None, image_seq_length=1)
        self.model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        self.model.eval().generation_config.eos_token_id = None

    def generate(self, content: str, *shown: Image.Image) -> tuple[list[int], list[int]]:
        """Return ids and greedy tokens of a message with a placeholder for each of these."""
        text = f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
        given: dict[str, Any] = {"images": [list(shown)]} if shown else {}
        inputs = self.processor(text=text, **given, add_special_tokens=False, return_tensors="pt")
        return self.say(inputs["input_ids"], inputs.get("pixel_values"))

    def say(self, ids: torch.Tensor, pixels: torch.Tensor | None) -> tuple[list[int], list[int]]:
        given = {} if pixels is None else {"pixel_values": pixels}
        found = self.model.generate(
            **{"input_ids": ids, "attention_mask": torch.ones_like(ids), **given},
            **{"do_sample": False, "pad_token_id": 2, "max_new_tokens": MOST},
        )
        return ids[0].tolist(), found[0, ids.shape[1] :].tolist()

    def watch(self, data: bytes, chosen: list[int]) -> tuple[list[int], list[int]]:
        """Return the same of a message with a video, of which these frames are seen."""
        mean, deviation = (
            np.array(NORMAL[f"image_{n}"], np.float32)[:, None, None] for n in ("mean", "std")
        )
        frames = np.moveaxis(read_all(data)[chosen], 3, 1).astype(np.float32) / 255
        pixels = torch.from_numpy((frames - mean) / deviation)
        lines = [f"Frame{i + 1}: <img><IMG_CONTEXT></img>" for i in range(len(chosen))]
        content = "\n".join(lines) + "\nso?"
        text = f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
        ids = self.processor.tokenizer(text, add_special_tokens=False, return_tensors="pt")
        return self.say(ids["input_ids"], pixels)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ({"model_type": "qwen2"}, ("--num-shard", "2")),
        ({"model_type": "qwen3", "head_dim": 16, "large": True}, ("--cpu-backend", "kernels")),
        ({"model_type": "llama"}, ("--cpu-backend", "torch")),
    ],
    ids=["qwen2-two-ranks", "qwen3-kernels", "llama-torch"],
)
def test_ids_and_tokens_are_those_of_transformers(
    tmp_path: Path, text: dict[str, Any], flags: tuple[str, ...]
) -> None:
    whole = {"image_token_id": VOCAB_SIZE, "image_seq_length": 1}
    size = VOCAB_SIZE + len(TOKENS)
    theirs, published = make_internvl(tmp_path, whole=whole, vocab_size=size, **text)
    for folder in (theirs, published):
        know(folder)
    oracle, mark = Oracle(theirs), "<IMG_CONTEXT>\n"
    served = ("--model-id", str(published), "--dtype", "float32", "--max-input-tokens", "450")
    with serving(*served, "--max-total-tokens", "500", *flags) as server:
        assert ask(server, "What?") == oracle.generate("What?")
        for picture in PICTURES:
            expected = oracle.generate(f"{mark}What?", picture)
            assert ask(server, picture, "What?") == expected
        expected = oracle.generate(f"So: {mark} and {mark}{mark}?", *PICTURES[1:])
        assert ask(server, "So: ", PICTURES[1], " and ", *PICTURES[2:], "?") == expected
        # Eight frames, from the middles of as many parts.
        expected = oracle.watch(VIDEO, [1, 4, 7, 10, 12, 15, 18, 21])
        assert ask(server, VIDEO, "so?") == expected
