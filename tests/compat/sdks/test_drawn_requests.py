"""Whatever fits the SDKs' types of requests is answered as their types of answers say, or refused
for a reason that has nothing to do with its shape."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

import pydantic
import pytest
from openai.types import chat, responses
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params

from tests.compat.sdks.drawing import draw
from tests.router.http.dialects.conversations import engine
from tests.router.http.fake_engine import TEMPLATE
from tests.router.http.served import served
from tgi_trio.router.http.engine_api import ServedLimits
from tgi_trio.router.text.tools.call_formats import HERMES

anthropic = pytest.importorskip("anthropic.types", reason="pip install -e '.[sdks]'")
pytestmark = pytest.mark.trio

EACH: Final = 60  # requests of a route
TEMPLATES: Final = "{# <think> </think> #}{{ reasoning_effort }}" + TEMPLATE
PIECES: Final = ("<think>Hm.</think>", "Yes. ", "é😀", HERMES.write([("f", {"a": "x"})]), "<b>")
USER: Final = {"role": "user", "content": "Rain?"}


def _anthropic(beta: bool) -> tuple[Any, Any, Any]:
    from anthropic.types import beta as preview
    from anthropic.types import message_create_params as plain
    from anthropic.types.beta import message_create_params as previewed

    if beta:
        params = previewed.MessageCreateParamsNonStreaming
        return params, preview.BetaMessage, preview.BetaRawMessageStreamEvent
    params = plain.MessageCreateParamsNonStreaming
    return params, anthropic.Message, anthropic.RawMessageStreamEvent


# route -> its path; types of the request, of a whole answer, and of an event; and the fields that
# are refused by their names, whatever they say
MESSAGES: Final = ("/v1/messages", *_anthropic(beta=False), ())
PREVIEW: Final = ("/v1/messages", *_anthropic(beta=True), ("thread", "compaction"))
CHATS: Final = (
    "/v1/chat/completions",
    chat_params.CompletionCreateParamsNonStreaming,
    chat.ChatCompletion,
    chat.ChatCompletionChunk,
    ("moderation", "audio", "modalities", "web_search_options", "functions", "function_call"),
)
RESPONSES: Final = (
    "/v1/responses",
    response_params.ResponseCreateParamsNonStreaming,
    responses.Response,
    responses.ResponseStreamEvent,
    ("prompt", "moderation", "prompt_cache_options", "conversation", "previous_response_id"),
)
ROUTES: Final[Mapping[str, tuple[Any, ...]]] = {
    "messages": MESSAGES,
    "messages-preview": PREVIEW,
    "chat": CHATS,
    "responses": RESPONSES,
}
# What is wrong with a request although it fits its type.
REASONS: Final = (
    "there are no tools$",
    r"Tool with name \S+ not found",
    "two tools have the name",
    "does not see images",
    "does not hear audio",
    # No files are stored, and none but texts are read.
    "files are not stored here",
    "no plain text",
    "whose `source` is neither",
    "parts of type `file` are not read",
    "holds `input_file`",
    # Nothing is said.
    "holds no message, call or result",
    "messages must not be empty",
    r"messages\[\d+\]: missing field `content`$",
    "needs `content` or `tool_calls`$",
    # What does not go together.
    "duplicate field `max_tokens`",
    "`top_logprobs` needs `logprobs`",
    "`response_format` beside `tools`",
    "`background` needs the response to be kept",
    "`image.context_compression` cannot",
    # What is older than calls of tools, or another server's.
    "not read: use `tool_calls`$",
    "no compaction of this server's",
    "Item with id '.*' not found",
    # Optional in the types, and yet there is no form without it.
    "missing field `schema`$",
)
KNOWN: Final = re.compile("|".join(REASONS))


@cache
def fitting(shape: Any) -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(shape)


def drawn(route: str, source: random.Random) -> dict[str, Any]:
    """Return a body; most of the drawn ones go on from a user's message."""
    _, params, _, _, refused = ROUTES[route]
    body: dict[str, Any] = draw(params, source)
    body = {name: value for name, value in body.items() if name not in refused}
    body |= {"model": "test/model", "stream": source.random() < 0.5}
    name = "input" if route == "responses" else "messages"
    given = body.get(name)  # OpenAI's types do not require it: a stored prompt may stand for it
    body[name] = [USER, *given] if isinstance(given, list) else given or [USER]
    return body


def saying(text: str) -> Callable[[str], str]:
    return lambda prompt: text


@pytest.mark.parametrize("route", ROUTES)
async def test_what_fits_the_types_is_answered_or_refused_for_a_reason(route: str) -> None:
    source = random.Random(route)
    path, _, whole, event, _ = ROUTES[route]
    limits = ServedLimits(max_input_tokens=60_000, max_total_tokens=64_000)
    one = engine("", TEMPLATES, limits=limits)
    answers = 0
    async with served(one) as server:
        for _ in range(EACH):
            body, text = drawn(route, source), "".join(source.choices(PIECES, k=3))
            one.answer = saying(text)
            client = await server.connect()
            answer = await client.post(path, body)
            await client.stream.aclose()
            if answer.status != 200:
                assert answer.status in (400, 404, 422), (answer.body, body)
                message = json.loads(answer.body)["error"]["message"]
                assert KNOWN.search(message), (message, body)
                continue
            answers += 1
            if not body["stream"]:
                fitting(whole).validate_python(json.loads(answer.body))
                continue
            lines = [line[5:] for line in answer.body.decode().split("\n") if line[:5] == "data:"]
            for line in lines:
                # The type of chunks knows no custom tools.
                if line.strip() != "[DONE]" and '"type":"custom"' not in line:
                    fitting(event).validate_python(json.loads(line))
    assert answers > EACH / 4
