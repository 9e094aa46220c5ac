"""Audio in chats, with everything real but the shard: what is rendered, counted and refused."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import pytest

from tests.router.http.fake_engine import FakeEngine
from tests.router.http.image_requests import MODEL, PAD, VIDEO_PAD, data_url, seeing_engine
from tests.router.http.served import served
from tests.router.media.image_files import encode, noise
from tests.router.media.sound_files import audio_part, make_sound
from tgi_trio.ipc.adapters import AdapterReport
from tgi_trio.model.audio_families import AUDIO_FAMILIES
from tgi_trio.router.adapters.registry import AdapterRegistry
from tgi_trio.router.media.audio_model import AudioModel
from tgi_trio.router.media.layouts.audio import WaveLayout
from tgi_trio.router.media.layouts.spoken import AudioTokens
from tgi_trio.router.text.chat_template import ChatTemplate

pytestmark = pytest.mark.trio

# The token of a video stands for audio here.
WAVES = WaveLayout(AudioTokens(VIDEO_PAD, "<", ">"), 640)
HEARING = replace(MODEL, others={"audio": AudioModel("gemma4_unified", WAVES, {})})
SMALL, LARGE = make_sound(0.4), make_sound(1.4, seed=1)
SHOWN = f"<{VIDEO_PAD * 10}>"


def asked(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 4}


@pytest.mark.parametrize("listed", [True, False])
async def test_a_sound_stands_where_it_is_in_a_message(listed: bool) -> None:
    """A template that knows no audio is given text, as is one that takes texts alone."""
    picture = {"type": "image_url", "image_url": {"url": data_url(encode(noise(28, 56)))}}
    typed = {"type": "text", "text": f"What {VIDEO_PAD} is"}
    async with seeing_engine(model=HEARING) as engine, served(engine) as server:
        if not listed:
            plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
            engine.chat_template = ChatTemplate({"default": plain}, {})
        client = await server.connect()
        answer = await client.post("/v1/chat/completions", asked(typed, audio_part(SMALL), picture))
        assert answer.status == 200, answer.text
        sound, image = engine.submitted[-1].images
        ids = engine.submitted[-1].prompt_ids
        pad, other = (engine.tokenizer.added_tokens[each] for each in (VIDEO_PAD, PAD))
        assert (ids[sound.first : sound.end] == pad).all() and sound.tokens == 10
        assert (ids[image.first : image.end] == other).all()
        assert (ids == pad).sum() == 11, "what is typed is text"
        assert sound.pixel_options.kind == "audio" and image.pixel_options.kind == "image"
        assert f"is{SHOWN}" in engine.tokenizer.decode(ids, skip_special=False)
        rendered = engine.metrics.render().decode()
        assert "tgi_audio_count 1\n" in rendered and "tgi_image_count 1\n" in rendered


@pytest.mark.parametrize("data", [SMALL, LARGE])
async def test_the_same_bytes_are_one_sound_however_they_come(data: bytes) -> None:
    """Whether their base64 stays in the body or is cut out of it as it comes."""
    text = base64.b64encode(data).decode()
    url = f"data:audio/wav;base64,{text}"
    sent = [
        audio_part(data),
        {"type": "audio_url", "audio_url": {"url": url}},
        {"type": "input_audio", "input_audio": {"format": "mp3", "data": url}},
    ]
    assert (len(text) > 2**15) == (data is LARGE)
    async with seeing_engine(model=HEARING) as engine, served(engine) as server:
        client = await server.connect()
        for part in sent:
            answer = await client.post("/v1/chat/completions", asked(part))
            assert answer.status == 200, answer.text
        content = [audio_part(data)]
        body = {"input": [{"role": "user", "content": content}], "max_output_tokens": 16}
        answer = await client.post("/v1/responses", body)
        assert answer.status == 200, answer.text
        assert len({each.images[0].key for each in engine.submitted}) == 1
        assert len(engine.submitted) == 4


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            MODEL,
            "an audio part, and this model does not hear audio parts, but those of "
            f"{', '.join(sorted(AUDIO_FAMILIES))} do",
        ),
        (
            replace(MODEL, unserved={"audio": "it needs PyAV"}),
            "an audio part, and audio parts are not served: it needs PyAV",
        ),
    ],
)
async def test_who_does_not_hear_says_so(model: Any, said: str) -> None:
    async with seeing_engine(model=model) as engine, served(engine) as server:
        client = await server.connect()
        answer = await client.post("/v1/chat/completions", asked(audio_part(SMALL)))
        assert answer.status == 422 and f"messages[0] holds {said}" in answer.text
        engine.images = None
        answer = await client.post("/v1/chat/completions", asked(audio_part(SMALL)))
        assert answer.status == 422 and "this model does not hear audio parts" in answer.text


async def test_a_part_without_its_sound_is_refused() -> None:
    engine = FakeEngine(lambda prompt: "Hi")
    async with served(engine) as server:
        client = await server.connect()
        for kind in ("input_audio", "audio_url"):
            answer = await client.post("/v1/chat/completions", asked({"type": kind}))
            assert answer.status == 422 and f"audio needs `{kind}`" in answer.text


async def test_the_models_own_adapter_hears_and_no_other_does() -> None:
    """It is chosen by what the prompt holds, under no name; a client's own is for text alone."""
    async with seeing_engine(model=HEARING) as engine, served(engine) as server:
        adapters = AdapterRegistry({"mine": "/mine"}, 1, own={"audio": "/own"})
        for order in adapters.orders():
            adapters.settle(AdapterReport(order.number, "", 10, 4, bytes(32)))
        engine.adapters = adapters
        engine.metrics.know("adapter", "mine")
        client = await server.connect()
        text = {"type": "text", "text": "Hi"}
        for parts, name, number in (
            *(((text, audio_part(SMALL)), "tgi", 1), ((text,), "tgi", 0)),
            *(((text,), "mine", 2), ((audio_part(LARGE),), "tgi", 1)),
        ):
            answer = await client.post("/v1/chat/completions", asked(*parts) | {"model": name})
            assert answer.status == 200, answer.text
            assert engine.submitted[-1].sampling.adapter == number
        refused = await client.post(
            "/v1/chat/completions", asked(audio_part(SMALL)) | {"model": "mine"}
        )
        assert refused.status == 422
        said = (
            "the adapter `mine` cannot be used here: this model has one of its own for prompts with"
        )
        assert f"{said} audio parts. Leave it out" in refused.text
        rendered = engine.metrics.render().decode()
        assert 'tgi_adapter_request_count{adapter="mine"} 1' in rendered
        assert 'adapter="audio"' not in rendered
        assert not any(each.users for each in adapters.loaded)


async def test_a_sound_beside_images_is_another_where_a_tower_minds_them() -> None:
    """The same bytes: its features are not those of the sound by itself."""

    class Minding(WaveLayout):
        minds_images = True

    waves = Minding(WAVES.tokens, WAVES.samples)
    model = replace(MODEL, others={"audio": AudioModel("gemma4_unified", waves, {})})
    picture = {"type": "image_url", "image_url": {"url": data_url(encode(noise(28, 56)))}}
    async with seeing_engine(model=model) as engine, served(engine) as server:
        client = await server.connect()
        for parts in ((audio_part(SMALL),), (audio_part(SMALL), picture), (picture,)):
            answer = await client.post("/v1/chat/completions", asked(*parts))
            assert answer.status == 200, answer.text
        alone, both, image = (each.images for each in engine.submitted)
        assert [each.pixel_options.beside for each in (*alone, *both, *image)] == [
            False,
            True,
            False,
            False,
        ]
        assert alone[0].key != both[0].key and both[1].key == image[0].key
