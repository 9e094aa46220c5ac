"""A model that hears and does not see, with everything real but the shard."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.http.fake_engine import FakeEngine
from tests.router.http.image_requests import VIDEO_PAD, data_url, seeing_engine
from tests.router.http.served import served
from tests.router.media.image_files import encode, noise
from tests.router.media.sound_files import audio_part, make_sound
from tgi_trio.errors import ModelLoadError
from tgi_trio.router.http.engine_api import ModelCard
from tgi_trio.router.media.audio_model import AudioModel
from tgi_trio.router.media.layouts.audio import WaveLayout
from tgi_trio.router.media.layouts.spoken import AudioTokens
from tgi_trio.router.media.media_model import MediaModel, name_served
from tgi_trio.router.text.chat_template import ChatTemplate

pytestmark = pytest.mark.trio

# The token of a video stands for audio here.
AUDIO = AudioModel("gemma4_unified", WaveLayout(AudioTokens(VIDEO_PAD, "<", ">"), 640), {})
MODEL = MediaModel("", None, {}, others={"audio": AUDIO})
SOUND = audio_part(make_sound(0.4))
PICTURE = data_url(encode(noise(28, 56)))
SHOWN = {"type": "image_url", "image_url": {"url": PICTURE}}
PARTS = (
    "{% for m in messages %}{% for p in m.content %}{% if p.type == 'audio' %}<|video_pad|>"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"


def asked(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 4}


@pytest.mark.parametrize("template", [PARTS, PLAIN])
async def test_it_hears_and_what_it_would_see_is_refused_or_text(template: str) -> None:
    typed = {"type": "text", "text": f"What {VIDEO_PAD} is"}
    async with seeing_engine(model=MODEL) as engine, served(engine) as server:
        engine.chat_template = ChatTemplate({"default": template}, {})
        client = await server.connect()
        answer = await client.post("/v1/chat/completions", asked(typed, SOUND))
        assert answer.status == 200, answer.text
        (sound,) = engine.submitted[-1].images
        ids = engine.submitted[-1].prompt_ids
        pad = engine.tokenizer.added_tokens[VIDEO_PAD]
        assert (ids[sound.first : sound.end] == pad).all() and sound.tokens == 10
        assert (ids == pad).sum() == 11, "what is typed is text"
        answer = await client.post("/v1/chat/completions", asked(SOUND, SHOWN))
        assert answer.status == 422
        assert "messages[0] holds an image, and this model does not see images" in answer.text
        link = "![](http://a.example/b.png)"
        answer = await client.post("/", {"inputs": link, "parameters": {"max_new_tokens": 2}})
        assert answer.status == 200 and not engine.submitted[-1].images
        assert engine.tokenizer.decode(engine.submitted[-1].prompt_ids) == link
    assert name_served(MODEL) == {"audio parts"} and MODEL.describe_largest(10**6, 100) == ""


async def test_where_it_is_served_without_its_ears_that_is_said() -> None:
    engine = FakeEngine(lambda _: "Hi", model=ModelCard("m", unserved={"audio": "it needs PyAV"}))
    async with served(engine) as server:
        client = await server.connect()
        for part, said in [
            (SOUND, "an audio part, and audio parts are not served: it needs PyAV"),
            (SHOWN, "an image, and this model does not see images"),
        ]:
            answer = await client.post("/v1/chat/completions", asked(part))
            assert answer.status == 422 and f"messages[0] holds {said}" in answer.text
        answer = await client.post("/generate", {"inputs": "![](http://a.example/b.png)"})
        assert answer.status == 200


async def test_a_tokenizer_without_its_token_is_refused() -> None:
    layout = WaveLayout(AudioTokens("<|sound|>", "<", ">"), 640)
    model = MediaModel("", None, {}, others={"audio": AudioModel("gemma4_unified", layout, {})})
    with pytest.raises(ModelLoadError, match=r"no token '<\|sound\|>', which this model's audio"):
        async with seeing_engine(model=model):
            pass
