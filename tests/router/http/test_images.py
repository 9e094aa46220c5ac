"""Images in requests of every dialect, through a served application."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import h11
import orjson
import pytest
import trio

from tests.router.http.fake_engine import FakeEngine
from tests.router.http.image_requests import (
    FLAGS,
    PAD,
    START,
    STOP,
    UNIT,
    data_url,
    seeing_engine,
    seen,
)
from tests.router.http.served import Client, read_until, served, until
from tests.router.http.test_hostile_images import hostile_server
from tests.router.http.wire.http2_client import Http2
from tests.router.media.image_files import encode, noise
from tests.router.media.test_fetch import Names, serving
from tgi_trio.router.http.app import Application
from tgi_trio.router.http.call import HttpSettings
from tgi_trio.router.http.engine_api import ModelCard
from tgi_trio.router.media.fetch import FetchLimits, MediaFetcher
from tgi_trio.router.media.policy import parse_policy

pytestmark = pytest.mark.trio

IMAGE = encode(noise(2 * UNIT, 3 * UNIT))  # 6 tokens
LARGE = encode(noise(8 * UNIT, 8 * UNIT))  # 64 tokens, 150 kB
OTHER = encode(noise(UNIT, 2 * UNIT), "JPEG")  # 2 tokens


def part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data), "detail": "auto"}}


def text_of(engine: FakeEngine, i: int = -1) -> str:
    """The prompt of a request, its special tokens shown."""
    return engine.tokenizer.decode(engine.submitted[i].prompt_ids, skip_special=False)


async def test_texts_and_images_keep_their_order_in_every_dialect() -> None:
    image, other = part(IMAGE), part(OTHER)
    texts = [{"type": "text", "text": each} for each in ("What ", " or ", f" {PAD}?")]
    shown = f"<user>What {START}{PAD * 6}{STOP} or {START}{PAD * 2}{STOP} {PAD}?<assistant>"
    tokens = len(shown) - 9 * (len(PAD) - 1) - 2 * (len(START) + len(STOP) - 2)
    content = [texts[0], image, texts[1], other, texts[2]]
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(IMAGE).decode()}
    anthropic = [{"type": "image", "source": source}, {"type": "text", "text": "Well?"}]
    openai = [
        {"type": "input_image", "image_url": data_url(OTHER)},
        {"type": "input_text", "text": "Well?"},
    ]
    async with seeing_engine() as engine, served(engine) as server:
        client = await server.connect()
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 5}
        answer = await client.post("/v1/chat/completions", body)
        assert answer.status == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens"] == tokens
        # One that was typed is no image, although it reads like one.
        assert text_of(engine) == shown
        assert seen(engine) == [(12, 6), (24, 2)]
        first, second = engine.submitted[-1].images
        assert (first.size, second.size) == ((56, 84), (28, 56)) and first.key != second.key

        tokenized = (await client.post("/chat_tokenize", body)).json()
        assert tokenized["templated_text"] == shown
        assert len(tokenized["tokenize_response"]) == tokens

        inputs = f"Look ![]({data_url(IMAGE)}) there"
        answer = await client.post("/generate", {"inputs": inputs})
        assert answer.json() == {"generated_text": "Hi"}
        assert text_of(engine) == f"<s>Look {START}{PAD * 6}{STOP} there"
        assert engine.submitted[-1].images[0].key == first.key
        stream = await client.post("/generate_stream", {"inputs": inputs})
        assert b'"generated_text":"Hi"' in stream.body and seen(engine) == [(7, 6)]

        body = {"model": "tgi", "messages": [{"role": "user", "content": anthropic}]}
        answer = await client.post("/v1/messages", {**body, "max_tokens": 5})
        shown = f"<user>{START}{PAD * 6}{STOP}Well?<assistant>"
        assert answer.status == 200 and text_of(engine) == shown
        told = (await client.post("/v1/messages/count_tokens", body)).json()["input_tokens"]
        assert (
            told == answer.json()["usage"]["input_tokens"] == len(engine.submitted[-1].prompt_ids)
        )

        body = {"model": "tgi", "input": [{"role": "user", "content": openai}]}
        answer = await client.post("/v1/responses", body)
        assert answer.status == 200, answer.text
        assert text_of(engine) == f"<user>{START}{PAD * 2}{STOP}Well?<assistant>"
        assert seen(engine) == [(7, 2)]
        rendered = engine.metrics.render().decode()
    assert "tgi_image_count 9\n" in rendered  # of /chat_tokenize and counts as well
    assert "tgi_image_cache_hits 7\n" in rendered


async def test_large_images_are_cut_out_of_bodies_in_every_dialect() -> None:
    url, mime = data_url(LARGE), "image/png"
    source = {"type": "base64", "media_type": mime, "data": base64.b64encode(LARGE).decode()}
    said = [{"role": "user", "content": [part(LARGE)]}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": said, "max_tokens": 5},
        "/v1/messages": {
            "model": "tgi",
            "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}],
            "max_tokens": 5,
        },
        "/v1/responses": {
            "model": "tgi",
            "input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}],
        },
        "/generate": {"inputs": f"![]({url})"},
        "/": {"inputs": [f"![]({url})"], "parameters": {"return_full_text": True}},
        "/vertex": {"instances": [{"inputs": f"![]({url})"}, {"messages": said}]},
        "/invocations": {"inputs": f"![]({url})"},
        "/chat_tokenize": {"messages": said},
    }
    async with seeing_engine() as engine, served(engine) as server:
        client = await server.connect()
        keys: set[bytes] = set()
        for path, body in bodies.items():
            answer = await client.post(path, body)
            assert answer.status == 200, (path, answer.text)
            keys |= {image.key for image in engine.submitted[-1].images}
            assert [tokens for _, tokens in seen(engine)] == [64], path
            if path == "/":
                assert answer.json()[0]["generated_text"] == f"![]({url})Hi"
                assert answer.headers["x-compute-characters"] == str(len(url) + 5)
        assert len(keys) == 1
        text = {"type": "text", "text": url}  # as text it stays what it is, and is too long
        answer = await client.post(
            "/v1/chat/completions", {"messages": [said[0] | {"content": [text]}]}
        )
        assert answer.status == 400 and f"it has {len(url) + 17} tokens" in answer.text
        broken = url.replace("A", "-")
        answer = await client.post("/generate", {"inputs": f"![]({broken})"})
        assert answer.status == 422 and "base64 encoding is invalid" in answer.text


async def test_large_images_come_over_http2_and_from_other_servers() -> None:
    """In pieces of every size; what has been read is free once the request has ended."""
    body = orjson.dumps({"inputs": f"![]({data_url(LARGE)})"})
    sizes = [len(body), 1000]
    async with seeing_engine() as engine, served(engine) as server:
        client = Http2(await server.raw())
        await client.flush()
        id = await client.post("/generate", body)
        await client.pump(lambda: id in client.ended)
        assert orjson.loads(client.body[id]) == {"generated_text": "Hi"}
        assert [tokens for _, tokens in seen(engine)] == [64]
        for size in sizes:
            assert b'"Hi"' in await ask_plainly(Application(engine), body, size)
            assert [tokens for _, tokens in seen(engine)] == [64]
        assert len({each.images[0].key for each in engine.submitted}) == 1
        assert engine.images is not None and engine.images.spool.nbytes
        assert not engine.images.spool.used


async def test_images_of_megabytes_are_received_where_they_stay() -> None:
    """Of several clients at once, with texts around them, and another request right behind."""
    picture = encode(noise(16 * UNIT, 16 * UNIT)) + bytes(2_000_000)  # no decoder reads behind it
    flags = replace(FLAGS, max_image_fetch_size=len(picture))
    settings = HttpSettings(payload_limit=4_000_000)
    async with seeing_engine(flags=flags) as engine, served(engine, settings) as server:
        assert engine.images is not None

        async def ask(number: int) -> None:
            inputs = f"{number}" * 70_000, f"![]({data_url(picture)})"
            body = orjson.dumps({"inputs": "".join(inputs), "parameters": {"truncate": 66}})
            short = Client.request("POST", "/generate", b'{"inputs":"x"}', {})
            client = await server.connect()
            await client.stream.send_all(Client.request("POST", "/generate", body, {}) + short)
            for _ in range(2):
                client.connection = h11.Connection(h11.CLIENT)
                client.connection.send(
                    h11.Request(method="GET", target="/", headers=[("host", "")])
                )
                answer = await client.answer()
                assert answer.status == 200 and answer.json() == {"generated_text": "Hi"}

        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(ask, number)
        shown = [each for each in engine.submitted if each.images]
        assert len(shown) == 3 and len({each.images[0].key for each in shown}) == 1
        assert engine.images.spool.nbytes and not engine.images.spool.used


@pytest.mark.parametrize("end", ["the client leaves", "time is over", "memory is over"])
async def test_a_body_that_ends_in_the_middle_of_an_image_leaves_nothing(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeout = 0.5 if end == "time is over" else 60.0
    settings = HttpSettings(payload_limit=4_000_000, body_timeout=timeout)
    async with seeing_engine() as engine, served(engine, settings) as server:
        assert engine.images is not None
        spool = engine.images.spool
        taken: list[int] = []  # blocks, whether or not they have been given back
        grant = spool.take

        def note(count: int) -> list[int]:
            taken.extend(blocks := grant(count))
            return blocks

        monkeypatch.setattr(spool, "take", note)
        body = orjson.dumps({"inputs": f"![]({data_url(bytes(2_500_000))})"})
        request = Client.request("POST", "/generate", body, {})
        stream = await server.raw()
        await stream.send_all(request[:2_000_000])  # of which the last megabyte may be left to wait
        await until(lambda: len(taken) > 8)
        if end == "the client leaves":
            stream.socket.close()
        elif end == "time is over":
            assert (await read_until(stream, b"\r\n")).startswith(b"HTTP/1.1 408 ")
        else:

            def take(count: int) -> list[int]:
                raise MemoryError

            monkeypatch.setattr(spool, "take", take)
            await stream.send_all(request[2_000_000:])
            assert b"HTTP/1.1 500 " in await read_until(stream, b"\r\n")
        await until(lambda: not spool.used)
        monkeypatch.undo()
        good = await (await server.connect()).post(
            "/generate", {"inputs": f"![]({data_url(LARGE)})"}
        )
        assert good.status == 200


async def ask_plainly(app: Application, body: bytes, size: int) -> bytes:
    """Post a body as any ASGI server would, in pieces of `size` bytes."""
    pieces = iter([body[start : start + size] for start in range(0, len(body), size)])
    answer: list[bytes] = []

    async def receive() -> dict[str, Any]:
        piece = next(pieces, None)
        if piece is None:
            await trio.sleep_forever()
        return {"type": "http.request", "body": piece, "more_body": True}

    async def send(message: Any) -> None:
        answer.append(message.get("body", b""))

    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    scope = {
        **{"type": "http", "method": "POST", "path": "/generate", "headers": headers},
        **{"http_version": "1.1", "query_string": b"", "scheme": "http"},
    }
    await app(scope, receive, send)  # type: ignore[arg-type]
    return b"".join(answer)


async def test_truncation_leaves_images_whole_or_out() -> None:
    async with seeing_engine() as engine, served(engine) as server:
        client = await server.connect()
        inputs = f"![]({data_url(IMAGE)}) and ![]({data_url(OTHER)})."
        for truncate, images in [(17, [(0, 6), (13, 2)]), (11, [(7, 2)]), (4, [(0, 2)]), (2, [])]:
            body = {"inputs": inputs, "parameters": {"truncate": truncate}}
            assert (await client.post("/generate", body)).status == 200
            assert seen(engine) == images
        answer = await client.post("/generate", {"inputs": inputs, "parameters": {"truncate": 3}})
        assert answer.status == 422
        assert "`truncate` cuts image 2 in two: keep its 2 tokens" in answer.text


async def test_a_model_that_sees_nothing_says_so_and_reads_links_as_text() -> None:
    engine = FakeEngine(lambda prompt: "Hi")
    source = {"type": "url", "url": "http://a.example/b.png"}
    async with served(engine) as server:
        client = await server.connect()
        answer = await client.post("/generate", {"inputs": "![](http://a.example/b.png)"})
        assert answer.status == 200 and not engine.submitted[-1].images
        for path, content, status in [
            ("/v1/chat/completions", part(IMAGE), 422),
            ("/v1/messages", {"type": "image", "source": source}, 400),
        ]:
            body = {"model": "tgi", "messages": [{"role": "user", "content": [content]}]}
            answer = await client.post(path, {**body, "max_tokens": 5})
            assert answer.status == status
            assert "messages[0] holds an image, and this model does not see images" in answer.text


async def test_a_model_whose_images_are_not_served_says_which_are() -> None:
    why = "model type 'florence2' has no vision tower here"
    card = ModelCard("m", unserved={"image": why})
    engine = FakeEngine(lambda prompt: "Hi", model=card)
    async with served(engine) as server:
        client = await server.connect()
        chat = {"messages": [{"role": "user", "content": [part(IMAGE)]}]}
        link = {"inputs": f"![]({data_url(IMAGE)})What?"}
        for path, body, where in [
            ("/v1/chat/completions", chat, "messages[0]"),
            ("/chat_tokenize", chat, "messages[0]"),
            ("/generate", link, "the prompt"),
            ("/generate_stream", link, "the prompt"),
            ("/", link, "the prompt"),
        ]:
            answer = await client.post(path, body)
            said = f"{where} holds an image, and images are not served: {why}"
            assert answer.status == (200 if "stream" in path else 422), path
            assert said in answer.text
        assert (await client.post("/generate", {"inputs": "[](x)"})).status == 200
    assert len(engine.submitted) == 1


async def test_bytes_of_all_requests_have_a_bound() -> None:
    async with serving(hostile_server) as port:
        fetcher = MediaFetcher(
            parse_policy(f"127.0.0.0/8,:{port},a.example"),
            FetchLimits(200_000, seconds=60.0),
            Names(a_example=[["127.0.0.2"]]),
        )
        flags = replace(FLAGS, max_image_bytes=2 * len(IMAGE))
        async with seeing_engine(fetcher, flags=flags) as engine, served(engine) as server:
            client = await server.connect()
            links = [f"![]({data_url(IMAGE)})", f"![](http://a.example:{port}/good)"]
            assert engine.images is not None
            for link in links:
                with engine.images.hold_bytes() as held:
                    held.take(len(IMAGE) + 1)
                    answer = await client.post("/generate", {"inputs": link})
                    assert answer.status == 429 and answer.headers["retry-after"] == "1"
                    assert "the images of all requests have too many bytes" in answer.text
                # What a request had is free once it has ended, well or not.
                assert (await client.post("/generate", {"inputs": link * 2})).status == 200
                answer = await client.post("/generate", {"inputs": link * 3})
                assert answer.status == 422
                assert f"more than {2 * len(IMAGE)} bytes together" in answer.text


async def test_parts_that_are_not_read_are_named_with_those_that_are() -> None:
    engine = FakeEngine(lambda prompt: "Hi")
    file = {"type": "input_file", "file_id": "file-1"}
    async with served(engine) as server:
        client = await server.connect()
        body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "?"}, file]}]}
        answer = await client.post("/v1/chat/completions", body)
    assert answer.status == 422
    assert "messages[0].content: parts of type `input_file` are not read, only" in answer.text
    assert "only `text`, `image_url`, `video_url`, `input_audio` and `audio_url`" in answer.text
