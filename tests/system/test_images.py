"""A model that sees behind a whole server: what it says is what transformers' `generate` says."""

from __future__ import annotations

import base64
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from PIL import Image

from bench.harness.server import Server
from bench.images import __main__ as bench
from bench.images.watched_server import LoopWatch
from tests.bench.smoke import SMALL
from tests.router.media.image_files import encode, noise
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
    flags = ("--image-memory", "65536", "--stall-timeout", "600")
    with serving("--model-id", str(folder), *flags) as server:
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
    assert server.metric("tgi_image_encode_duration_count") == 2


def test_a_picture_that_is_none_costs_one_request_and_a_killed_shard_none(
    server: ServerProcess,
) -> None:
    before = ask(server, *PICTURES)["choices"]
    answer = post(f"{server.url}/generate", json={"inputs": f"![]({url_of(b'<svg/>')})"})
    assert answer.status_code == 422 and "it is none of PNG" in answer.text
    (shard,) = server.shards()
    os.kill(shard, signal.SIGKILL)
    assert ask(server, *PICTURES)["choices"] == before


def test_a_shard_killed_under_eight_image_requests_costs_no_token(server: ServerProcess) -> None:
    pictures = [noise(40, 40 + i, seed=i) for i in range(8)]
    before = [ask(server, picture)["choices"] for picture in pictures]
    accepted, _ = server.books()
    (shard,) = server.shards()
    os.kill(shard, signal.SIGSTOP)  # so that all of them are under way when it dies
    with ThreadPoolExecutor(len(pictures)) as pool:
        try:
            answers = [pool.submit(ask, server, picture) for picture in pictures]
            server.wait_metric("tgi_request_accepted", accepted + len(pictures))
        finally:
            os.kill(shard, signal.SIGKILL)
        assert [answer.result()["choices"] for answer in answers] == before
    server.wait_idle()


def test_the_benchmark_of_images_measures_a_server(server: ServerProcess) -> None:
    args = bench.parse(SMALL["bench.images"].split())
    found = bench.Found()
    bench.measure(Server("127.0.0.1", server.port, 0.0, server.process.pid), args, found)
    watch = LoopWatch()
    trio.run(_hold_the_loop, instruments=[watch])
    turns = np.array(watch.turns).reshape(-1, 4)
    turns[:, 0] = found.windows[0][1]
    found.add_turns(turns)
    text, results = found.summary()
    (row,) = results["images"]
    assert row["turn, ms, longest"] >= 20.0 and row["turns > 5 ms"] >= 1
    assert row["its CPU, ms, longest"] < 20.0 and row["by CPU"] == 0
    assert results["decode_ratio"] > 0.0 and results["second_ratio"] > 0.0
    assert "gap between tokens, image prompts" in text


async def _hold_the_loop() -> None:
    await trio.sleep(0)
    time.sleep(0.02)
