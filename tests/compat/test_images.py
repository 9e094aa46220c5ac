"""OpenAI's SDK and huggingface_hub send images as they always do."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
import trio
from huggingface_hub import InferenceClient

from tests.router.http.fake_engine import FakeEngine
from tests.router.http.image_requests import PAD, START, STOP, UNIT, seeing_engine
from tests.router.http.served import served
from tests.router.media.image_files import encode, noise

pytestmark = pytest.mark.trio

URL = f"data:image/png;base64,{base64.b64encode(encode(noise(UNIT, 3 * UNIT))).decode()}"
PARTS: list[Any] = [
    {"type": "text", "text": "What is this?"},
    {"type": "image_url", "image_url": {"url": URL}},
]
SHOWN = f"<user>What is this?{START}{PAD * 3}{STOP}<assistant>"


@asynccontextmanager
async def address() -> AsyncIterator[tuple[FakeEngine, str]]:
    async with seeing_engine() as engine, served(engine) as server:
        yield engine, f"http://127.0.0.1:{server.port}"


def prompts(engine: FakeEngine) -> list[str]:
    return [engine.tokenizer.decode(each.prompt_ids, False) for each in engine.submitted]


async def test_openais_client() -> None:
    def talk(url: str) -> None:
        client: Any = openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0)
        messages = [{"role": "user", "content": PARTS}]
        whole = client.chat.completions.create(model="tgi", messages=messages)
        assert whole.choices[0].message.content == "Hi"
        assert whole.usage.prompt_tokens == len(SHOWN) - 3 * (len(PAD) - 1) - (
            len(START) + len(STOP) - 2
        )
        stream = client.chat.completions.create(model="tgi", messages=messages, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "Hi"
        content = [
            {"type": "input_text", "text": "What is this?"},
            {"type": "input_image", "image_url": URL, "detail": "auto"},
        ]
        answer = client.responses.create(model="tgi", input=[{"role": "user", "content": content}])
        assert answer.output_text == "Hi"
        bad = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
        with pytest.raises(openai.UnprocessableEntityError, match="it is none of PNG"):
            client.chat.completions.create(
                model="tgi",
                messages=[{"role": "user", "content": bad}],
            )

    async with address() as (engine, url):
        await trio.to_thread.run_sync(talk, url)
        assert prompts(engine) == [SHOWN] * 3


async def test_huggingface_hubs_client() -> None:
    def talk(url: str) -> None:
        client: Any = InferenceClient(url)
        whole = client.chat_completion([{"role": "user", "content": PARTS}], max_tokens=5)
        assert whole.choices[0].message.content == "Hi"
        stream = client.chat_completion([{"role": "user", "content": PARTS}], stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "Hi"
        assert client.text_generation(f"Look: ![]({URL})") == "Hi"
        pieces = client.text_generation(f"![]({URL})", stream=True)
        assert "".join(pieces).startswith("Hi")

    async with address() as (engine, url):
        await trio.to_thread.run_sync(talk, url)
        image = f"{START}{PAD * 3}{STOP}"
        assert prompts(engine) == [SHOWN, SHOWN, f"<s>Look: {image}", f"<s>{image}"]
