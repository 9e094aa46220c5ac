"""What both APIs are asked of: a model, its template, and how a body reaches it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.router.http.fake_engine import FakeEngine
from tests.router.http.served import Answer, served
from tgi_trio.router.http.engine_api import ServedLimits
from tgi_trio.router.text.chat_template import ChatTemplate

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ROME, PARIS = ("weather", {"city": "Rome"}), ("weather", {"city": 'Pa"ris}'})
LIMITS = ServedLimits(max_input_tokens=6000, max_total_tokens=8000)
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.thinking }}{{ m.content }}"
    "{{ m.tool_call_id }}{{ m.name }}"
    "{% for c in m.tool_calls %}{{ c.id }}{{ c.function | tojson }}{% endfor %}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def engine(answer: str = "Yes.", template: str = TEMPLATE, **options: Any) -> FakeEngine:
    options.setdefault("limits", LIMITS)
    found = FakeEngine(lambda prompt: answer, **options)
    found.chat_template = ChatTemplate({"default": template}, {})
    return found


async def post(
    engine: FakeEngine, http: Any, path: str, body: Mapping[str, Any], more: Mapping[str, Any]
) -> Answer:
    """Send a body with some fields replaced; `...` leaves one out."""
    async with served(engine, http) as server:
        client = await server.connect()
        fields = {name: value for name, value in {**body, **more}.items() if value is not ...}
        return await client.post(path, fields)


def prompt(engine: FakeEngine, answer: Answer) -> str:
    """Return the prompt that a body has become."""
    assert answer.status == 200, answer.body
    return engine.tokenizer.decode(engine.submitted[0].prompt_ids)


def frames(answer: Answer) -> list[tuple[bytes, bytes]]:
    """Return the events of a stream as their names and data."""
    assert answer.status == 200, answer.body
    *events, last = answer.body.split(b"\n\n")
    assert last == b""
    lines = [frame.split(b"\n") for frame in events]
    return [(n.removeprefix(b"event: "), data.removeprefix(b"data: ")) for n, data in lines]
