"""A model that sees behind a whole server: what it says is what transformers' `generate` says."""

from __future__ import annotations

import base64
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.router.images.image_files import encode, noise
from tests.system.client import post
from tests.system.server import ServerProcess, serving
from tgi_trio.demo.vision import COLOURS, IMAGE, QUESTION, make_vision_model

pytestmark = pytest.mark.system

PICTURES = [noise(40, 50), Image.new("RGB", (64, 32), COLOURS["red"])]
MOST = 8  # tokens of an answer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    make_vision_model(folder, steps=4)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with serving("--model-id", str(folder), "--image-memory", "65536") as server:
        yield server


def ask(server: ServerProcess, *pictures: Image.Image) -> dict[str, Any]:
    shown = [
        {"type": "image_url", "image_url": {"url": url_of(encode(picture))}} for picture in pictures
    ]
    content = [*shown, {"type": "text", "text": QUESTION}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": MOST}
    answer = post(f"{server.url}/v1/chat/completions", json=body | {"temperature": 0})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def url_of(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def expected(folder: Path, *pictures: Image.Image) -> tuple[str, int]:
    """What transformers' processor and `generate` make of it, and the tokens of the prompt."""
    import torch
    from transformers import (
        AutoTokenizer,
        LlavaForConditionalGeneration,
        LlavaImageProcessorPil,
        LlavaProcessor,
    )

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    by_any = {"check_argument_for_proper_class": lambda self, name, value: type(value)}
    kind = type("AnyProcessor", (LlavaProcessor,), by_any)  # PIL's processor is none of its own
    processor: Any = kind(
        LlavaImageProcessorPil.from_pretrained(folder),
        tokenizer,
        patch_size=16,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    text = f"<|begin|><|user|>{IMAGE * len(pictures)}{QUESTION}<|end|><|assistant|>"
    inputs = processor(
        text=text, images=list(pictures), return_tensors="pt", add_special_tokens=False
    )
    model = LlavaForConditionalGeneration.from_pretrained(folder).eval()
    tokens = model.generate(
        **inputs, max_new_tokens=MOST, do_sample=False, pad_token_id=0, use_cache=True
    )
    length = inputs["input_ids"].shape[1]
    with torch.no_grad():
        return tokenizer.decode(tokens[0, length:], skip_special_tokens=True), length


def test_answers_and_counts_are_those_of_transformers(server: ServerProcess, folder: Path) -> None:
    for pictures in [(PICTURES[0],), (PICTURES[1],), tuple(PICTURES)]:
        answer = ask(server, *pictures)
        text, tokens = expected(folder, *pictures)
        assert answer["choices"][0]["message"]["content"] == text
        assert answer["usage"]["prompt_tokens"] == tokens
    assert server.metric("tgi_image_count") == 4
    assert server.metric("tgi_image_cache_hits") == 2


def test_a_picture_that_is_none_costs_one_request_and_a_killed_shard_none(
    server: ServerProcess,
) -> None:
    before = ask(server, *PICTURES)["choices"]
    answer = post(f"{server.url}/generate", json={"inputs": f"![]({url_of(b'<svg/>')})"})
    assert answer.status_code == 422 and "it is none of PNG" in answer.text
    (shard,) = server.shards()
    os.kill(shard, signal.SIGKILL)
    assert ask(server, *PICTURES)["choices"] == before
