"""KServe's v2 protocol."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.http.fake_engine import FakeEngine
from tests.router.http.served import served
from tgi_trio.router.http.call import HttpSettings
from tgi_trio.router.http.engine_api import ModelCard

pytestmark = pytest.mark.trio

MODEL = "/v2/models/test/model/versions/1"


def echo() -> FakeEngine:
    return FakeEngine(lambda prompt: prompt.removeprefix("<s>")[::-1])


def tensor(text: str | bytes) -> dict[str, Any]:
    data = text.encode() if isinstance(text, str) else text
    return {"name": "in", "shape": [1, len(data)], "datatype": "BYTES", "data": list(data)}


async def test_texts_are_tensors_of_bytes(http):
    async with served(echo(), http) as server:
        client = await server.connect()
        body = {
            "id": "mine",
            "inputs": [tensor("abc"), tensor("dé")],
            "outputs": [{"name": "one"}, {"name": "two"}],
            "parameters": {"max_new_tokens": 2},
        }
        answer = await client.post(f"{MODEL}/infer", body)
    assert answer.status == 200
    assert answer.json() == {
        "id": "mine",
        "outputs": [
            {"name": "one", "shape": [1, 2], "datatype": "BYTES", "data": list(b"cb")},
            {"name": "two", "shape": [1, 2], "datatype": "BYTES", "data": list("é".encode())},
        ],
    }
    assert [each.sampling.sample for each in server.engine.submitted] == [False, False]


async def test_the_server_and_its_model_are_described(http):
    async with served(echo(), http) as server:
        client = await server.connect()
        about = (await client.get("/v2")).json()
        assert about["name"] == "text-generation-inference"
        assert about["extensions"] == ["health", "models", "metrics"]
        assert (await client.get(MODEL)).json() == {
            "name": "test/model",
            "version": "1",
            "extensions": ["infer", "ready"],
        }
        assert (await client.get("/v2/health/live")).body == b'{"live":true}'
        for path in ("/v2/health/ready", f"{MODEL}/ready"):
            assert (await client.get(path)).json() == {"live": True, "ready": True}
        server.engine.healthy = (False, "no steps")
        assert (await client.get("/v2/health/live")).status == 200
        for path in ("/v2/health/ready", f"{MODEL}/ready"):
            answer = await client.get(path)
            assert (answer.status, answer.json()["error"]) == (503, "unhealthy: no steps")


@pytest.mark.parametrize(
    ("inputs", "outputs", "status", "kind"),
    [
        ([tensor("a")], [], 422, "length mismatch"),
        ([tensor(b"\xff")], [{"name": "o"}], 422, "utf8"),
        ([tensor("")], [{"name": "o"}], 422, "validation"),
        ([], [], 422, None),
        ([{**tensor("a"), "data": [256]}], [{"name": "o"}], 422, None),
    ],
)
async def test_what_is_wrong_is_told(inputs, outputs, status, kind):
    async with served(echo()) as server:
        client = await server.connect()
        answer = await client.post(f"{MODEL}/infer", {"inputs": inputs, "outputs": outputs})
    assert answer.status == status
    if kind is None:
        assert answer.body.startswith(b"Failed to deserialize the JSON body")
    else:
        assert answer.json()["error_type"] == kind
    assert server.engine.permits == 0


async def test_another_model_is_a_404():
    async with served(FakeEngine(model=ModelCard("here"))) as server:
        client = await server.connect()
        body = {"inputs": [tensor("a")], "outputs": [{"name": "o"}]}
        for model, status in (("there", 404), ("here", 200), ("tgi", 200)):
            path = f"/v2/models/{model}/versions/1"
            assert (await client.get(path)).status == status
            assert (await client.get(f"{path}/ready")).status == status
            assert (await client.post(f"{path}/infer", body)).status == status


async def test_generating_asks_for_the_key():
    async with served(echo(), HttpSettings(api_keys=("k",))) as server:
        client = await server.connect()
        body = {"inputs": [tensor("a")], "outputs": [{"name": "o"}]}
        assert (await client.post(f"{MODEL}/infer", body)).status == 401
        assert (await client.get("/v2")).status == 200
