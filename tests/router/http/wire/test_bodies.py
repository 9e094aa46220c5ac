"""Bodies that cannot be read, are too large, come too slowly, or are asked for first."""

from __future__ import annotations

import gzip

import h11
import msgspec
import pytest
import trio

from tests.router.http.served import Client, served
from tgi_trio.router.http.call import HttpSettings
from tgi_trio.router.http.messages import replies

pytestmark = pytest.mark.trio

SYNTAX = "Failed to parse the request body as JSON: "
SHAPE = "Failed to deserialize the JSON body into the target type: "
TOO_LARGE = (  # TGI's words, then what helps
    b"Failed to buffer the request body: length limit exceeded: "
    b"it is longer than 1000 bytes (--payload-limit)"
)


@pytest.mark.parametrize(
    ("body", "status", "start"),
    [
        (b"", 400, SYNTAX),
        (b"{", 400, SYNTAX),
        # The place is that in the body, not in the string.
        (b'{"inputs":"x\xff"}', 400, SYNTAX + "invalid start byte of UTF-8 (byte 12: 0xff)"),
        (b'{"inputs":"\xe9"}', 400, SYNTAX + "invalid continuation byte of UTF-8 (byte 11: 0xe9)"),
        (b'{"inputs":"\\ud800",}', 400, SYNTAX),
        (b'{"x":' + b"[" * 100_000, 400, SYNTAX),
        (b"[1]", 422, SHAPE),
        (b"{}", 422, SHAPE),
        (b'{"inputs":null}', 422, SHAPE + "inputs: "),
        (b'{"inputs":"x","parameters":null}', 422, SHAPE + "parameters: "),
        (b'{"inputs":"x","parameters":{"stop":null}}', 422, SHAPE + "parameters.stop: "),
        (b'{"inputs":"x","parameters":{"details":null}}', 422, SHAPE + "parameters.details: "),
        (b'{"inputs":"x","parameters":{"temperature":"hot"}}', 422, SHAPE + "parameters.temp"),
        (b'{"inputs":"x","parameters":{"top_k":5.0}}', 422, SHAPE + "parameters.top_k: "),
        (b'{"inputs":"x","parameters":{"seed":-1}}', 422, SHAPE + "parameters.seed: "),
        (b'{"inputs":"x","parameters":{"max_new_tokens":4294967296}}', 422, SHAPE + "param"),
        (b'{"inputs":"x","parameters":{"temperature":1e400}}', 422, SHAPE),
    ],
)
async def test_unreadable_bodies_are_plain_text(http, body, status, start):
    async with served(http=http) as server:
        client = await server.connect()
        answer = await client.post("/generate", body)
        good = await client.post("/generate", {"inputs": "x"})
    assert answer.status == status
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.body.decode().startswith(start)
    assert good.status == 200


async def test_nulls_are_fine_where_a_field_is_optional():
    names = [
        "best_of", "temperature", "repetition_penalty", "frequency_penalty", "top_k", "top_p",
        "typical_p", "max_new_tokens", "return_full_text", "truncate", "seed", "top_n_tokens",
        "grammar", "adapter_id",
    ]  # fmt: skip
    async with served() as server:
        client = await server.connect()
        parameters = {**dict.fromkeys(names), "unknown": {"any": "thing"}}
        answer = await client.post("/generate", {"inputs": "x", "parameters": parameters})
    assert answer.status == 200


@pytest.mark.parametrize("name", ["watermark", "do_sample"])
async def test_nulls_are_refused_where_a_field_has_a_default(name):
    async with served() as server:
        client = await server.connect()
        answer = await client.post("/generate", {"inputs": "x", "parameters": {name: None}})
    assert (answer.status, answer.text.startswith(f"{SHAPE}parameters.{name}: ")) == (422, True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/completions", {"prompt": "x"}),
    ],
)
async def test_options_of_a_stream_may_be_null(path, body, stream):
    async with served() as server:
        client = await server.connect()
        plain = await client.post(path, {**body, "stream": stream})
        null = await client.post(path, {**body, "stream": stream, "stream_options": None})
    assert (null.status, len(null.text)) == (200, len(plain.text))


@pytest.mark.parametrize(
    ("names", "given", "text"),
    [
        (("max_tokens", "max_completion_tokens"), (3, 3), ""),
        (("max_tokens", "max_completion_tokens"), (3, None), ""),
        (
            ("max_tokens", "max_completion_tokens"),
            (3, 4),
            "`max_tokens` = 3 and `max_completion_tokens` = 4 are names of one field, send one of ",
        ),
        (("thinking_token_budget", "max_think_tokens"), (8, 8), ""),
        (
            ("thinking_token_budget", "thinking_budget_tokens"),
            (8, -1),
            "`thinking_token_budget` = 8 and `thinking_budget_tokens` = -1 are names of one field",
        ),
    ],
)
async def test_two_names_of_one_field_may_say_one_thing_only(names, given, text):
    async with served() as server:
        client = await server.connect()
        body = {"messages": [{"role": "user", "content": "x"}]}
        body |= dict(zip(names, given, strict=True))
        answer = await client.post("/v1/chat/completions", body)
    if text:
        assert answer.status == 422
        message = answer.json()["error"]["message"]
        assert message.startswith(f"{SHAPE}duplicate field `{names[0]}`: {text}")
    else:
        assert answer.status == 200
        if names[0] == "max_tokens":
            assert answer.json()["usage"]["completion_tokens"] == 3


async def test_empty_prompt_list_has_tgis_text():
    async with served() as server:
        client = await server.connect()
        answer = await client.post("/v1/completions", {"prompt": []})
    assert answer.status == 422
    assert answer.json()["error"]["message"].endswith("Do not use an empty array for the prompt.")


async def test_bodies_that_cannot_be_read_are_told_of_in_openais_shape(http):
    async with served(http=http) as server:
        client = await server.connect()
        shape = await client.post("/v1/chat/completions", {"messages": "x"})
        syntax = await client.post("/v1/completions", b"{")
        kind = await client.post("/v1/completions", b"{}", content_type="text/plain")
    for answer, status, text in (
        (shape, 422, "messages: Expected `array`"),
        (syntax, 400, "Failed to parse the request body as JSON"),
        (kind, 415, "Content-Type: application/json"),
    ):
        reply = msgspec.json.decode(answer.body, type=replies.OpenAIErrorResponse)
        assert answer.status == reply.error.http_status_code == status
        assert text in reply.error.message
        assert reply.error.type == reply.error_type == "invalid_body"


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ("application/vnd.api+json", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
    ],
)
async def test_content_types(http, kind, status):
    async with served(http=http) as server:
        client = await server.connect()
        answer = await client.post("/generate", {"inputs": "x"}, content_type=kind)
    assert answer.status == status
    if status == 415:
        assert answer.body == b"Expected request with `Content-Type: application/json`"


@pytest.mark.parametrize(
    ("path", "status"),
    [("/generate", 415), ("/v1/chat/completions", 415), ("/v1/messages", 400), ("/tokenize", 415)],
)
async def test_a_compressed_body_is_refused_by_its_name(http, path, status):
    async with served(http=http) as server:
        client = await server.connect()
        body = gzip.compress(b'{"inputs":"x"}')
        answer = await client.post(path, body, content_encoding="gzip")
        plain = await client.post("/generate", {"inputs": "x"}, content_encoding="Identity")
    assert answer.status == status
    assert b"`Content-Encoding: gzip`" in answer.body
    assert plain.status == 200


async def test_large_bodies_are_refused_and_the_connection_ends(http):
    settings = HttpSettings(payload_limit=1000, shortcut=http.shortcut)
    async with served(http=settings) as server:
        for headers in ({}, {"transfer-encoding": "chunked"}):
            client = await server.connect()
            body = b'{"inputs":"' + b"x" * 2000 + b'"}'
            if headers:
                await client.stream.send_all(
                    b"POST /generate HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\n"
                    b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(body), body)
                )
                data = b""
                while more := await client.stream.receive_some(65536):
                    data += more  # until the server closes, although the body never ended
                assert data.startswith(b"HTTP/1.1 413 ")
                assert data.endswith(TOO_LARGE)
            else:
                answer = await client.post("/generate", body)
                assert answer.status == 413
                assert answer.body == TOO_LARGE


async def test_the_answer_to_a_large_body_reaches_a_client_that_is_still_sending():
    async with served(http=HttpSettings(payload_limit=1000)) as server:
        stream = await server.raw()
        head = Client.request("POST", "/generate", b"", {"content-length": "30000000"})
        await stream.send_all(head)
        received = bytearray()

        async def push():
            for _ in range(100):
                try:
                    await stream.send_all(b"x" * 100_000)
                except trio.BrokenResourceError:
                    return

        async with trio.open_nursery() as nursery:
            nursery.start_soon(push)
            while data := await stream.receive_some(65536):
                received += data
            nursery.cancel_scope.cancel()
    assert received.startswith(b"HTTP/1.1 413 ")


async def test_a_body_that_does_not_come_is_not_waited_for(http):
    settings = HttpSettings(body_timeout=0.5, shortcut=http.shortcut)
    async with served(http=settings) as server:
        stream = await server.raw()
        await stream.send_all(Client.request("POST", "/generate", b"", {"content-length": "9"}))
        data = b""
        while more := await stream.receive_some(65536):
            data += more
    assert data.startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_bodies_too_large_or_too_slow_are_told_of_in_openais_shape(http, path):
    settings = HttpSettings(payload_limit=1000, body_timeout=0.5, shortcut=http.shortcut)
    async with served(http=settings) as server:
        client = await server.connect()
        large = await client.post(path, b"x" * 1001)
        late = await server.connect()
        await late.stream.send_all(Client.request("POST", path, b"", {"content-length": "9"}))
        late.connection.send(h11.Request(method="POST", target=path, headers=[("host", "t")]))
        slow = await late.answer()
    for answer, status in ((large, 413), (slow, 408)):
        assert answer.status == status
        found = msgspec.json.decode(answer.body, type=replies.OpenAIErrorResponse)
        assert found.error.http_status_code == status and found.error_type == "invalid_body"
        assert answer.headers["content-type"] == "application/json"


async def test_a_client_that_asks_first_is_told_to_send_or_not_to(http):
    settings = HttpSettings(payload_limit=1000, shortcut=http.shortcut)
    async with served(http=settings) as server:
        stream = await server.raw()
        ask = {"expect": "100-continue"}
        body = b'{"inputs":"x"}'
        head = Client.request("POST", "/generate", b"", {**ask, "content-length": str(len(body))})
        await stream.send_all(head)
        assert (await stream.receive_some(65536)).startswith(b"HTTP/1.1 100 ")
        await stream.send_all(body)
        assert (await stream.receive_some(65536)).startswith(b"HTTP/1.1 200 ")

        stream = await server.raw()
        head = Client.request("POST", "/generate", b"", {**ask, "content-length": "100000000"})
        await stream.send_all(head)
        data = b""
        while more := await stream.receive_some(65536):
            data += more
        assert data.startswith(b"HTTP/1.1 413 ") and b"HTTP/1.1 100" not in data
