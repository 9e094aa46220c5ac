"""Transcriptions, with everything real but the shard: what is asked, answered and refused."""

from __future__ import annotations

import base64
import json
import random
import threading
from typing import Any

import pytest

from tests.router.http.fake_engine import FakeEngine
from tests.router.http.image_requests import VIDEO_PAD, seeing_engine
from tests.router.http.served import Answer, Client, served
from tests.router.http.test_route_metrics import counted
from tests.router.media.sound_files import make_sound
from tgi_trio.router.http.messages import body_reader
from tgi_trio.router.http.messages.multipart import FormData, read_form
from tgi_trio.router.http.routes import transcriptions
from tgi_trio.router.media.audio_model import AudioModel
from tgi_trio.router.media.layouts.audio import PiecesLayout, WaveLayout
from tgi_trio.router.media.layouts.spoken import AudioTokens
from tgi_trio.router.media.media_model import MediaModel
from tgi_trio.router.text.chat_template import ChatTemplate

pytestmark = pytest.mark.trio

PATH = "/v1/audio/transcriptions"
# The token of a video stands for audio here.
WAVES = WaveLayout(AudioTokens(VIDEO_PAD, "<", ">"), 640)
PIECES = PiecesLayout(AudioTokens(VIDEO_PAD, "<", ""), 480_000, 5)
PARTS = (
    "{% for m in messages %}{% for p in m.content %}{% if p.type == 'audio' %}<|video_pad|>"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}"
)
SMALL, LARGE = make_sound(0.4), make_sound(3.0, seed=1)
KIND = "multipart/form-data; boundary=xyz"


def form(*files: bytes, **fields: str) -> bytes:
    """Return a form with files, all of one name, and fields."""
    parts = [
        b'--xyz\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n'
        b"Content-Type: audio/wav\r\n\r\n%b\r\n" % each
        for each in files
    ]
    parts += [
        f'--xyz\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in fields.items()
    ]
    return b"".join((*parts, b"--xyz--\r\n"))


def hearing(layout: Any) -> MediaModel:
    return MediaModel("", None, {}, others={"audio": AudioModel("gemma4_unified", layout, {})})


async def ask(client: Client, body: bytes, kind: str = KIND) -> Answer:
    return await client.post(PATH, body, content_type=kind)


@pytest.mark.parametrize("sound", [SMALL, LARGE])
async def test_a_chat_asks_for_the_text_of_a_sound(sound: bytes) -> None:
    async with seeing_engine(model=hearing(WAVES)) as engine, served(engine) as server:
        engine.chat_template = ChatTemplate({"default": PARTS}, {})
        client = await server.connect()
        plain = "Please transcribe this audio into text"
        for fields, asked in (
            ({}, plain),
            (
                {"language": "en", "model": "tgi", "temperature": "0"},
                f"{plain}. The language is en.",
            ),
            ({"prompt": "What is sung?"}, "What is sung?"),
        ):
            answer = await ask(client, form(sound, **fields))
            assert answer.status == 200, answer.text
            request = engine.submitted[-1]
            written = engine.tokenizer.decode(request.prompt_ids, skip_special=False)
            assert written.replace(VIDEO_PAD, "") == f"<>{asked}"
            assert len(request.images) == 1 and not request.sampling.sample
            usage = answer.json()["usage"]
            assert answer.json()["text"] and usage["input_tokens"] == len(request.prompt_ids)
            assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        text = await ask(client, form(sound, response_format="text", temperature="0.5"))
        assert text.headers["content-type"].startswith("text/plain")
        assert text.body.decode().strip() == answer.json()["text"]
        assert engine.submitted[-1].sampling.sample
        assert counted(engine, PATH) == (4, 0, 4)
        streamed = await ask(client, form(sound, stream="true"))
        *deltas, done = (json.loads(each) for each in streamed.events())
        assert {each["type"] for each in deltas} == {"transcript.text.delta"}
        assert "".join(each["delta"] for each in deltas).strip() == done["text"]
        assert (done["type"], done["text"]) == ("transcript.text.done", answer.json()["text"])
        assert done["usage"] == usage | {
            "input_tokens": (count := done["usage"]["input_tokens"]),
            "total_tokens": count + usage["output_tokens"],
        }


async def test_an_answer_is_as_long_as_there_is_room() -> None:
    """No limit of ours cuts a long sound's text off."""
    async with seeing_engine(model=hearing(WAVES)) as engine, served(engine) as server:
        engine.chat_template = ChatTemplate({"default": PARTS}, {})
        client = await server.connect()
        assert (await ask(client, form(SMALL))).status == 200
        assert (await ask(client, form(SMALL, max_completion_tokens="3"))).status == 200
    whole, short = engine.submitted
    room = engine.limits.max_total_tokens - len(whole.prompt_ids)
    assert (whole.stopping.max_new_tokens, short.stopping.max_new_tokens) == (room, 3)


async def test_a_prompt_of_its_own_needs_its_token() -> None:
    async with seeing_engine(model=hearing(PIECES)) as engine, served(engine) as server:
        client = await server.connect()
        answer = await ask(client, form(SMALL))
        assert answer.status == 422
        assert "transcribes by the token '[TRANSCRIBE]', which its tokenizer lacks" in answer.text


@pytest.mark.parametrize(
    ("given", "seed"), [("7", 7), ("-2", 2**64 - 2), (str(2**64 - 1), 2**64 - 1), ("-1", None)]
)
async def test_seeds_are_those_of_chats(given: str, seed: int | None) -> None:
    """Negative ones were refused."""
    async with seeing_engine(model=hearing(WAVES)) as engine, served(engine) as server:
        engine.chat_template = ChatTemplate({"default": PARTS}, {})
        client = await server.connect()
        for _ in range(2):
            answer = await ask(client, form(SMALL, temperature="0.5", seed=given))
            assert answer.status == 200, answer.text
    seeds = [request.sampling.seed for request in engine.submitted]
    assert seeds == [seed, seed] if seed is not None else seeds[0] != seeds[1]


@pytest.mark.parametrize(
    ("body", "said", "param"),
    [
        (form(), "`file` is to be a file: a sound", "file"),
        (form(file="abc"), "`file` is to be a file: a sound", "file"),
        (form(SMALL, SMALL), "`file` stands in the form twice", "file"),
        (form(b"no sound"), "invalid audio: it is none of WAV, MP3", "file"),
        (form(SMALL, response_format="srt"), "is to be `json` or `text`: no times are known", ...),
        (form(SMALL, stream="yes"), "`stream` is to be `true` or `false`", "stream"),
        (form(SMALL, temperature="warm"), "`temperature` is to be a number from 0 to 100", ...),
        (form(SMALL, temperature="101"), "is to be a number from 0 to 100", "temperature"),
        (form(SMALL, seed="1.5"), "`seed` is to be a whole number", "seed"),
        (form(SMALL, seed=str(2**64)), "`seed` must be >= -2^63 and < 2^64", "seed"),
        (form(SMALL, seed=str(-(2**63) - 1)), "`seed` must be >= -2^63 and < 2^64", "seed"),
        (form(SMALL, max_completion_tokens="-1"), "is to be a whole number", ...),
        (form(SMALL, language="e;n"), "is to be a code like `en`, or a name", "language"),
        (form(SMALL, language="en", prompt="x"), "which `prompt` replaces: give one of both", ...),
        (form(SMALL, hotwords="a"), "`hotwords` is not read, only `file`, `model`, ", ...),
        (
            form(SMALL, **{"timestamp_granularities[]": "word"}),
            "`timestamp_granularities` is not supported: models tell no times",
            "timestamp_granularities",
        ),
        (
            form(SMALL, **{"chunking_strategy[type]": "server_vad"}),
            "`chunking_strategy` is not supported: a sound is heard as a whole",
            "chunking_strategy",
        ),
        (
            b'--xyz\r\nContent-Disposition: form-data; name="include[]"\r\n\r\nlogprobs\r\n' * 2
            + b"--xyz--\r\n",
            "`include` is not supported: answers have no log-probabilities",
            "include",
        ),
        (form(SMALL, prompt="x" * 70_000), "`prompt` has more than 65536 bytes", "prompt"),
        (b"--xyz\r\nContent-Disp", "Failed to parse the form in the body", None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_is_wrong_with_a_form_is_said(body: bytes, said: str, param: Any) -> None:
    async with seeing_engine(model=hearing(WAVES)) as engine, served(engine) as server:
        engine.chat_template = ChatTemplate({"default": PARTS}, {})
        answer = await ask(await server.connect(), body)
        assert answer.status in (400, 422) and said in answer.json()["error"]["message"]
        if param is not ...:
            assert answer.json()["error"]["param"] == param
        assert not engine.submitted


async def test_a_large_form_is_read_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    beside: list[bool] = []

    def read_somewhere(headers: dict[bytes, bytes], body: bytes) -> FormData:
        beside.append(threading.current_thread() is not threading.main_thread())
        return read_form(headers, body)

    monkeypatch.setattr(transcriptions, "read_form", read_somewhere)
    async with seeing_engine(model=hearing(WAVES)) as engine, served(engine) as server:
        engine.chat_template = ChatTemplate({"default": PARTS}, {})
        client = await server.connect()
        for sound in (SMALL, LARGE):
            assert (await ask(client, form(sound))).status == 200
    assert len(SMALL) < body_reader.LARGE < len(LARGE) and beside == [False, True]


@pytest.mark.parametrize("size", [0, 1, 3071, 3072, 3073, 20_000])
async def test_base64_is_the_same_slice_by_slice(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transcriptions, "_SLICE", 3 << 10)
    sound = random.Random(size).randbytes(size)
    assert transcriptions._encode(sound) == base64.b64encode(sound).decode()


async def test_other_bodies_and_models_that_do_not_hear_are_refused() -> None:
    async with served(FakeEngine(lambda _: "Hi")) as server:
        client = await server.connect()
        answer = await ask(client, b"{}", "application/json")
        assert answer.status == 415 and "multipart/form-data" in answer.text
        answer = await ask(client, form(SMALL))
        assert answer.status == 422
        assert "`file` holds an audio part, and this model does not hear" in answer.text
        answer = await ask(client, form(SMALL, model="other"))
        assert answer.status == 404
