"""SageMaker's route: the body decides who answers."""

from __future__ import annotations

import pytest

from tests.router.http.fake_engine import FakeEngine
from tests.router.http.served import served

pytestmark = pytest.mark.trio

USER = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/", {"inputs": "x", "messages": USER, "parameters": {"return_full_text": False}}),
        ("/v1/chat/completions", {"messages": USER, "prompt": "x"}),
        ("/v1/completions", {"prompt": "x"}),
    ],
)
async def test_the_first_shape_that_fits_answers(http, path, body, stream):
    async with served(FakeEngine(lambda prompt: "Hi"), http) as server:
        client = await server.connect()
        ours = await client.post("/invocations", {**body, "stream": stream})
        theirs = await client.post(path, {**body, "stream": stream})
    assert ours.status == theirs.status == 200
    assert ours.headers["content-type"] == theirs.headers["content-type"]
    if stream:
        assert len(ours.events()) == len(theirs.events())
    else:
        first, second = ours.json(), theirs.json()
        for each in (first, second):
            if isinstance(each, dict):
                assert each.pop("id") and each.pop("created")
        assert first == second


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({}, 422, "needs `inputs`, `messages` or `prompt`"),
        ({"inputs": "x", "parameters": {"top_k": "a"}}, 422, "parameters.top_k: Expected"),
        ({"messages": [{"content": "x"}]}, 422, "messages[0]: Object missing"),
        ({"prompt": 5}, 422, "prompt: Expected"),
        (b"{", 400, "Failed to parse the request body as JSON: "),
        ([], 422, "Expected `object`"),
    ],
)
async def test_a_body_that_fits_nothing_is_told_why(body, status, text):
    async with served() as server:
        client = await server.connect()
        answer = await client.post("/invocations", body)
    assert answer.status == status
    assert text in answer.body.decode()


async def test_half_a_surrogate_pair_is_named_where_the_rest_is_no_json(http):
    async with served(http=http) as server:
        client = await server.connect()
        lone = await client.post("/generate", b'{"inputs": "\\ud800",}')
        short = await client.post("/generate", b'{"inputs": "x')
    assert lone.status == short.status == 400
    assert b"surrogate" in lone.body and b"truncated" not in lone.body
    assert b"surrogate" not in short.body
