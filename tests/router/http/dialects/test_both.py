"""What Messages and Responses have in common: tools beside forms, odd tools, clients that leave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.router.http.dialects import anthropic_answers as anthropic
from tests.router.http.dialects import responses_answers as responses
from tests.router.http.dialects.conversations import engine
from tests.router.http.served import read_until, served, until
from tgi_trio.errors import GrammarError

pytestmark = pytest.mark.trio

RAIN = {"type": "object", "properties": {"rain": {"type": "boolean"}}}
FORM = {"type": "json_schema", "name": "rain", "schema": RAIN}
ODD = {"type": "object", "properties": {"x": {"type": "string", "pattern": "(?=y)y"}}}


@dataclass(frozen=True, slots=True)
class Api:
    """One of the two, and how it calls things."""

    path: str
    body: dict[str, Any]
    tools: list[Any]
    odd: dict[str, Any]  # a tool
    schema: str  # what it calls the schema of a tool
    form: dict[str, Any]  # of the answer
    asked: Callable[..., Any]
    error: Callable[..., Any]


MESSAGES = Api(
    path=anthropic.PATH,
    body=anthropic.BODY,
    tools=anthropic.TOOLS,
    odd={"name": "odd", "input_schema": ODD},
    schema="input_schema",
    form={"output_config": {"format": FORM}},
    asked=anthropic.asked,
    error=anthropic.error,
)
RESPONSES = Api(
    path=responses.PATH,
    body=responses.BODY,
    tools=responses.TOOLS,
    odd={"type": "function", "name": "odd", "parameters": ODD},
    schema="parameters",
    form={"text": {"format": FORM}},
    asked=responses.asked,
    error=responses.error,
)
EACH = pytest.mark.parametrize("api", [MESSAGES, RESPONSES], ids=["messages", "responses"])


@EACH
async def test_a_form_beside_tools_is_for_answers_that_call_none(api: Api) -> None:
    one = engine()
    assert (await api.asked(one, tools=api.tools, **api.form)).status == 200
    grammar = one.submitted[0].sampling.grammar
    assert '"rain"' in grammar and "weather" in grammar and "TEXT" not in grammar


async def refuse_lookahead(grammar: str, tokenizer: Path | None) -> None:
    """Check grammars as a shard does that cannot look ahead."""
    await trio.lowlevel.checkpoint()
    if "(?=y)" in grammar:
        raise GrammarError("no lookahead")


@EACH
async def test_one_tool_that_no_grammar_fits_does_not_end_a_session(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    one, strict = engine(), engine()
    for each in (one, strict):
        each.validator._check_grammar = refuse_lookahead
    assert (await api.asked(one, tools=[*api.tools, api.odd])).status == 200
    grammar = one.submitted[0].sampling.grammar
    assert "odd" in grammar and "weather" in grammar and "(?=y)" not in grammar
    assert "to the parameters of odd" in caplog.text
    answer = await api.asked(strict, tools=[*api.tools, {**api.odd, "strict": True}])
    status, _, *_, message = api.error(answer)
    assert status == 400 and f"the `{api.schema}` of `odd`: no lookahead" in message


@EACH
async def test_leaving_ends_a_stream_at_once(http: Any, api: Api) -> None:
    one = engine("ab" * 3000)
    async with served(one, http, running=False) as server:
        client = await server.connect()
        await client.send("POST", api.path, {**api.body, "stream": True})
        await until(lambda: bool(one.live))
        one.step()
        await read_until(client.stream, b"\n\n")
        await client.stream.aclose()
        await until(lambda: len(one.left) == 1)
    assert one.permits == 0 and not one.live
