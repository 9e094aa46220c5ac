"""Fields of other servers that are not served: refused where they would change something."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.http.fake_engine import FakeEngine
from tests.router.http.served import served
from tgi_trio.router.http.messages import schema, unserved
from tgi_trio.router.text.chat_template import ChatTemplate

pytestmark = pytest.mark.trio

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"prompt": "x"},
}
TABLES = {"/v1/chat/completions": unserved.CHAT, "/v1/completions": unserved.COMPLETION}
ODD = {"a": 1}  # no field means nothing by this


async def ask(path: str, **more: Any) -> tuple[int, str]:
    async with served() as server:
        client = await server.connect()
        answer = await client.post(path, {**BODIES[path], **more})
    return answer.status, answer.body.decode()


@pytest.mark.parametrize("path", BODIES)
async def test_each_field_of_the_table_is_refused_by_name_with_advice(path):
    async with served() as server:
        client = await server.connect()
        for name, row in TABLES[path].items():
            answer = await client.post(path, {**BODIES[path], name: ODD})
            text = answer.json()["error"]["message"]
            assert answer.status == 422, name
            assert f"`{name}` is not supported: {row.advice}. Given: " in text
        assert server.engine.submitted == []


@pytest.mark.parametrize("path", BODIES)
async def test_values_that_change_nothing_are_taken(path):
    table = TABLES[path]
    async with served() as server:
        client = await server.connect()
        for turn in range(3):
            values = {n: (None, *row.neutral)[turn:][:1] for n, row in table.items()}
            fields = {name: value[0] for name, value in values.items() if value}
            answer = await client.post(path, {**BODIES[path], **fields})
            assert answer.status == 200, answer.body


@pytest.mark.parametrize("path", BODIES)
async def test_what_clients_send_without_a_meaning_here_is_taken(path):
    fields = {
        "nobody_knows_this": 1,
        "guided_decoding_backend": "outlines",
        "spaces_between_special_tokens": False,
        "cache_prompt": False,
        "user": "somebody",
        "length_penalty": 1.0,
        "mirostat_tau": 5.0,
    }
    assert (await ask(path, **fields))[0] == 200


@pytest.mark.parametrize("path", BODIES)
async def test_a_long_value_is_not_repeated_whole(path):
    status, text = await ask(path, samplers=["x" * 10_000])
    assert status == 422 and len(text) < 500


@pytest.mark.parametrize("path", BODIES)
async def test_values_that_nest_deeply_end_nothing(path):
    async with served() as server:
        client = await server.connect()
        body = b'{"lora":' + b"[" * 50_000 + b"]" * 50_000 + b"}"
        answer = await client.post(path, body, content_type="application/json")
        assert answer.status in (400, 422)
        assert (await client.post(path, BODIES[path])).status == 200


async def test_no_field_can_be_served_and_refused_at_once():
    class Both(schema.CompletionRequest):
        mirostat: int | None = None

    with pytest.raises(ValueError, match="mirostat"):
        schema.BodyReader(Both)


async def test_fields_the_sampler_knows_are_served_instead():
    fields = {"typical_p": 0.5, "min_p": 0.1, "top_k": 3, "repetition_penalty": 1.5}
    async with served() as server:
        client = await server.connect()
        for path, body in BODIES.items():
            answer = await client.post(path, {**body, **fields, "stop_token_ids": [7]})
            assert answer.status == 200
            request = server.engine.submitted[-1]
            assert request.sampling.typical_p == 0.5
            assert request.stopping.stop_ids == {7}
            assert not request.stopping.keep_stop
            for name in ("include_stop_str_in_output", "no_stop_trim"):
                assert (await client.post(path, {**body, name: True})).status == 200
                assert server.engine.submitted[-1].stopping.keep_stop
            assert (await client.post(path, {**body, "typical_p": 1})).status == 200
            assert server.engine.submitted[-1].sampling.typical_p == 1.0


async def test_documents_reach_a_template_that_shows_them():
    template = "{% for each in documents or [] %}[{{ each.text }}]{% endfor %}"
    engine = FakeEngine(lambda prompt: "Hi")
    engine.chat_template = ChatTemplate({"default": template + "{{ messages[0].content }}"}, {})
    async with served(engine) as server:
        client = await server.connect()
        body = {**BODIES["/v1/chat/completions"], "documents": [{"text": "a"}, {"text": "b"}]}
        answer = await client.post("/chat_tokenize", body)
    assert answer.json()["templated_text"] == "[a][b]x"
