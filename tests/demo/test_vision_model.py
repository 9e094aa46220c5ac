"""The model that sees and is made on the spot: a folder that everything here can read."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tgi_trio.demo.vision import COLOURS, IMAGE, QUESTION, main, make_vision_model
from tgi_trio.router.media.layouts.layout import ImageSize
from tgi_trio.router.media.media_model import find_media_model
from tgi_trio.router.text.chat_template import ChatTemplate
from tgi_trio.router.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    assert math.isfinite(make_vision_model(folder, steps=1))
    return folder


def test_it_takes_images_of_any_size_as_four_tokens(folder: Path) -> None:
    model = find_media_model(folder)
    assert model is not None and model.family == "llava" and model.layout is not None
    assert model.layout.count_features(ImageSize(480, 640)) == 4
    tokenizer = Tokenizer.from_folder(folder)
    assert model.layout.placeholder == IMAGE in tokenizer.added_tokens


def test_its_template_writes_an_image_where_it_stands(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    template = ChatTemplate(tokenizer.chat_templates, tokenizer.special_tokens)
    assert template.writes_parts(IMAGE)
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    shown = template.render([{"role": "user", "content": content}])
    assert shown == f"<|begin|><|user|>{IMAGE}{QUESTION}<|end|><|assistant|>"


def test_transformers_reads_it(folder: Path) -> None:
    from transformers import LlavaForConditionalGeneration

    model = LlavaForConditionalGeneration.from_pretrained(folder)
    assert model.config.image_token_id == Tokenizer.from_folder(folder).added_tokens[IMAGE]
    assert len(COLOURS) == 6


def test_a_word_too_few_is_told_how(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: python -m tgi_trio.demo.vision FOLDER" in capsys.readouterr().err
