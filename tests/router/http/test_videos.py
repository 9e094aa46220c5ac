"""Videos in chats, with everything real but the shard: what is rendered, counted and refused."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import pytest

from tests.router.http.fake_engine import FakeEngine
from tests.router.http.image_requests import (
    MODEL,
    PAD,
    START,
    STOP,
    VIDEO_PAD,
    data_url,
    seeing_engine,
)
from tests.router.http.served import served
from tests.router.media.image_files import encode, noise
from tests.router.media.video_files import make_video, video_url
from tgi_trio.media.patch_canvases import Qwen2Canvas
from tgi_trio.model.video_families import VIDEO_FAMILIES
from tgi_trio.router.media.layouts.videos import WholeLayout
from tgi_trio.router.media.media_model import VideoModel
from tgi_trio.router.text.chat_template import ChatTemplate

pytestmark = pytest.mark.trio

SETTINGS = {"patch_size": 14, "min_pixels": 784, "max_pixels": 50176}
VIDEOS = VideoModel("qwen2", WholeLayout(Qwen2Canvas.read(SETTINGS, 768)), SETTINGS)
SEEING = replace(MODEL, others={"video": VIDEOS})
CLIP = make_video(frames=8, height=56, width=56)
SHOWN = 2 * 4  # tokens: two grids of two by two
LIST_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def shown(url: str) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}}


def asked(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 4, **fields}


def text_of(engine: FakeEngine) -> str:
    return engine.tokenizer.decode(engine.submitted[-1].prompt_ids, skip_special=False)


async def test_a_video_stands_where_it_is_in_a_message() -> None:
    picture = {"type": "image_url", "image_url": {"url": data_url(encode(noise(28, 56)))}}
    async with seeing_engine(model=SEEING) as engine, served(engine) as server:
        client = await server.connect()
        typed = {"type": "text", "text": f"What {VIDEO_PAD} is"}
        answer = await client.post(
            "/v1/chat/completions", asked(typed, shown(video_url(CLIP)), picture)
        )
        assert answer.status == 200, answer.text
        video, image = engine.submitted[-1].images
        ids = engine.submitted[-1].prompt_ids
        pad, other = (engine.tokenizer.added_tokens[each] for each in (VIDEO_PAD, PAD))
        assert (ids[video.first : video.end] == pad).all() and video.tokens == SHOWN
        assert (ids[image.first : image.end] == other).all() and image.tokens == 2
        assert (ids == pad).sum() == SHOWN + 1, "what is typed is text"
        assert len({video.key, image.key}) == 2 and video.pixel_options.kind == "video"
        rendered = engine.metrics.render().decode()
        assert "tgi_video_count 1\n" in rendered and "tgi_image_count 1\n" in rendered


@pytest.mark.parametrize("template", [None, LIST_TEMPLATE])
async def test_a_template_that_knows_no_videos_is_given_text(template: str | None) -> None:
    """One that writes images as parts, and one that takes texts alone."""
    async with seeing_engine(model=SEEING) as engine, served(engine) as server:
        if template is not None:
            engine.chat_template = ChatTemplate({"default": template}, {})
        client = await server.connect()
        body = asked({"type": "text", "text": "So: "}, shown(video_url(CLIP)))
        answer = await client.post("/v1/chat/completions", body)
        assert answer.status == 200, answer.text
        pads = VIDEO_PAD * SHOWN
        expected = f"{START}{pads}{STOP}" if template is None else f"{pads}\n"
        assert f"So: {expected}" in text_of(engine)


async def test_the_same_frames_are_one_video_however_they_come() -> None:
    """In a small body and in a large one, whose base64 is decoded elsewhere; not as an image."""
    keys = []
    frames = [encode(noise(56, 56, seed=i)) for i in range(4)]
    texts = [base64.b64encode(each).decode() for each in frames]
    url = f"data:video/jpeg;base64,{','.join(texts)}"
    assert len(url) > 2**15
    async with seeing_engine(model=SEEING) as engine, served(engine) as server:
        client = await server.connect()
        for _ in range(2):
            answer = await client.post("/v1/chat/completions", asked(shown(url)))
            assert answer.status == 200, answer.text
            keys.append(engine.submitted[-1].images[0].key)
        small = f"data:video/jpeg;base64,{','.join(texts[:2])}"
        assert len(small) < 2**15
        answer = await client.post("/v1/chat/completions", asked(shown(small)))
        assert answer.status == 200, answer.text
        assert engine.submitted[-1].images[0].tokens == SHOWN // 2
        wrong = url.replace(",", ", ")
        answer = await client.post("/v1/chat/completions", asked(shown(wrong)))
        assert answer.status == 422, answer.text
    assert keys[0] == keys[1]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            MODEL,
            f"this model does not see videos, but those of {', '.join(sorted(VIDEO_FAMILIES))}",
        ),
        (
            replace(MODEL, unserved={"video": "they need PyAV"}),
            "videos are not served: they need PyAV",
        ),
    ],
)
async def test_who_sees_no_videos_says_so(model: Any, said: str) -> None:
    async with seeing_engine(model=model) as engine, served(engine) as server:
        client = await server.connect()
        answer = await client.post("/v1/chat/completions", asked(shown(video_url(CLIP))))
        assert answer.status == 422 and f"messages[0] holds a video, and {said}" in answer.text
        engine.images = None
        answer = await client.post("/v1/chat/completions", asked(shown(video_url(CLIP))))
        assert answer.status == 422 and "this model does not see videos" in answer.text


async def test_a_part_without_its_address_is_refused() -> None:
    async with seeing_engine(model=SEEING) as engine, served(engine) as server:
        client = await server.connect()
        answer = await client.post("/v1/chat/completions", asked({"type": "video_url"}))
        assert answer.status == 422 and "a video needs `video_url`" in answer.text
