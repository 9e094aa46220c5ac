"""Vertex AI: prompts and conversations in one call."""

from __future__ import annotations

import pytest

from tests.router.http.fake_engine import FakeEngine
from tests.router.http.served import served
from tgi_trio.router.http.call import HttpSettings
from tgi_trio.router.http.engine_api import ServedLimits

pytestmark = pytest.mark.trio

USER = [{"role": "user", "content": "Hi"}]


def echo(**more) -> FakeEngine:
    return FakeEngine(lambda prompt: prompt.removeprefix("<s>")[::-1], **more)


async def test_every_instance_has_its_prediction(http):
    async with served(echo(), http) as server:
        client = await server.connect()
        instances = [
            {"inputs": "abc"},
            {"messages": USER, "max_completion_tokens": 4, "n": 1},
            {"inputs": "def", "parameters": {"max_new_tokens": 2, "seed": 7}},
        ]
        answer = await client.post("/vertex", {"instances": instances})
    assert answer.status == 200
    assert answer.body == b'{"predictions":["cba",">tna","fe"]}'
    assert not [name for name in answer.headers if name.startswith("x-compute")]
    first, chat, last = server.engine.submitted
    assert first.sampling.sample and last.sampling.sample, "prompts always sample"
    assert last.sampling.seed == 7
    assert chat.prompt_ids[0] != 0, "a rendered conversation brings its own special tokens"


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({"instances": []}, 422, '{"error":"Input validation error","error_type":"Input vali'),
        ({"instances": 3}, 422, "instances: Expected `array`"),
        ({"instances": [{}]}, 422, "instances[0]: needs `inputs` or `messages`"),
        ({"instances": [{"inputs": "a"}, {"inputs": 3}]}, 422, "instances[1].inputs: Expected"),
        ({"instances": [{"inputs": ""}]}, 422, "`inputs` cannot be empty"),
        ({"instances": [{"messages": USER, "model": "x"}]}, 404, "`x` is not served here"),
        ({"instances": [{"messages": USER, "n": 2}]}, 422, "one prediction, and no `n`. Given: 2"),
        (b'{"instances": [}', 400, "Failed to parse the request body as JSON: "),
    ],
)
async def test_what_is_wrong_is_told(body, status, text):
    async with served(echo()) as server:
        client = await server.connect()
        answer = await client.post("/vertex", body)
    assert answer.status == status
    assert text in answer.body.decode()
    assert server.engine.submitted == [] and server.engine.permits == 0


async def test_every_instance_takes_a_permit():
    fake = echo(limits=ServedLimits(max_concurrent_requests=3))
    async with served(fake) as server:
        client = await server.connect()
        with fake.permit(2):
            two = await client.post("/vertex", {"instances": [{"inputs": "a"}] * 2})
            one = await client.post("/vertex", {"instances": [{"inputs": "a"}]})
    assert (two.status, one.status) == (429, 200)


async def test_a_failed_generation_fails_the_call():
    fake = echo()
    fake.fail_after = 1
    async with served(fake) as server:
        client = await server.connect()
        answer = await client.post("/vertex", {"instances": [{"inputs": "abc"}] * 2})
    assert answer.status == 424 and answer.json()["error_type"] == "generation"
    assert fake.permits == 0 and fake.live == {}


async def test_vertex_ai_names_the_routes():
    http = HttpSettings(predict_route="/generate", health_route="/is/it/well", api_keys=("k",))
    async with served(echo(), http) as server:
        client = await server.connect()
        body = {"instances": [{"inputs": "abc"}]}
        answer = await client.post("/generate", body, authorization="Bearer k")
        vertex = await client.post("/vertex", body, authorization="Bearer k")
        guarded = await client.post("/generate", body)
        health = await client.get("/is/it/well")
        ours = await client.get("/health")
    assert answer.body == vertex.body == b'{"predictions":["cba"]}'
    assert guarded.status == 401
    assert health.status == ours.status == 200
