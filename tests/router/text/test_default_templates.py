"""Templates of families whose folders have none: as their own programs write a prompt."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.models.got_ocr2.processing_got_ocr2 import GotOcr2Processor

from tests.router.media.image_files import noise
from tgi_trio.model.config import read_config
from tgi_trio.router.text.chat_template import ChatTemplate
from tgi_trio.router.text.default_templates import write_templates

IMAGE = {"type": "image"}


def template(folder: Path, kind: str) -> ChatTemplate:
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    return ChatTemplate(write_templates(folder, None), {"bos_token": "<bos>"})


def ask(made: ChatTemplate, *parts: Any) -> str:
    content = [part if isinstance(part, dict) else {"type": "text", "text": part} for part in parts]
    return made.render([{"role": "user", "content": content}], add_generation_prompt=True)


@pytest.mark.parametrize("asked", [{}, {"color": "red"}, {"format": True}], ids=str)
def test_a_page_is_read_as_the_processor_of_got_asks(tmp_path: Path, asked: dict[str, Any]) -> None:
    whole: Any = GotOcr2Processor
    whole.check_argument_for_proper_class = lambda self, name, value: type(value)
    pixels = SimpleNamespace(fetch_images=lambda images: images)
    tokens = SimpleNamespace(convert_tokens_to_ids=lambda token: 0, init_kwargs={})
    given = {"format": False, "color": None, "images_kwargs": {}, **asked}
    layout = whole(pixels, tokens).prepare_inputs_layout(images=[noise(9, 9)], **given)
    [expected] = layout[1]
    made = template(tmp_path, "got_ocr2")
    text = {"color": "[red]  OCR: ", "format": " OCR with format: "}.get(next(iter(asked), ""), "")
    assert ask(made, IMAGE, *filter(None, [text])) == expected
    assert made.writes_parts("<imgpad>")


def test_a_conversation_of_got_may_have_its_own_system(tmp_path: Path) -> None:
    both = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "So?"}]
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|><|im_start|>user\nSo?<|im_end|>"
        "<|im_start|>assistant\n"
    )
    assert template(tmp_path, "got_ocr2").render(both) == expected


@pytest.mark.parametrize("kind", ["unlimited_ocr", "deepseek_ocr2"])
def test_deepseek_ocr_reads_what_is_asked_behind_a_page(tmp_path: Path, kind: str) -> None:
    made = template(tmp_path, kind)
    assert ask(made, IMAGE, "Free OCR.") == "<bos><image>\nFree OCR."
    assert made.writes_parts("<image>")
    both = [{"role": "system", "content": "Be brief. "}, {"role": "user", "content": "So?"}]
    assert made.render(both) == "<bos>Be brief. So?"


def test_of_others_none_is_known(tmp_path: Path) -> None:
    assert write_templates(tmp_path, None) == {}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava"}))
    assert write_templates(tmp_path, None) == {}


def test_an_answer_of_got_ends_with_its_turn(tmp_path: Path) -> None:
    """Which its files do not say, and transformers' examples do."""
    values = {"model_type": "got_ocr2", "vocab_size": 9, "eos_token_id": 5}
    (tmp_path / "config.json").write_text(json.dumps(values))
    tokens = {"added_tokens_decoder": {"7": {"content": "<|im_end|>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokens))
    assert read_config(tmp_path).eos_ids == (5, 7)
