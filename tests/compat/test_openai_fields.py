"""Every field that OpenAI's own client can send is served, refused, or documented to do nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from tgi_trio.router.http.dialects.responses.schema import ResponsesRequest
from tgi_trio.router.http.messages.body_reader import BodyReader
from tgi_trio.router.http.messages.schema import ChatRequest, CompletionRequest

DOCS = Path(__file__).parents[2] / "docs"


def fields(*shapes: type) -> set[str]:
    """Return the fields of TypedDicts, inherited ones included."""
    found: set[str] = set()
    for shape in shapes:
        found |= shape.__required_keys__ | shape.__optional_keys__  # type: ignore[attr-defined]
    return found


def served(shape: Any) -> set[str]:
    return {field.encode_name for field in msgspec.structs.fields(shape)}


def idle(page: str, row: str) -> set[str]:
    """Return the fields that a row of a page names as those without effect."""
    (line,) = [line for line in (DOCS / page).read_text().splitlines() if row in line]
    return set(line.split("|")[1].replace("`", "").replace(",", " ").split())


@pytest.mark.parametrize(
    ("params", "shape"),
    [(chat_create_params, ChatRequest), (completion_create_params, CompletionRequest)],
)
def test_fields_of_chats_and_completions(params: Any, shape: Any) -> None:
    sent = fields(params.CompletionCreateParamsNonStreaming, params.CompletionCreateParamsStreaming)
    known = served(shape) | shape.unserved.keys()
    assert sent - known <= idle("tgi-compat.md", "taken, without effect")


def test_fields_of_responses() -> None:
    params = response_create_params
    sent = fields(params.ResponseCreateParamsNonStreaming, params.ResponseCreateParamsStreaming)
    without = idle("responses.md", "without effect: the answer says")
    without |= idle("responses.md", "| ignored |")
    assert sent - served(ResponsesRequest) <= without


NEEDED: dict[Any, dict[str, Any]] = {
    ChatRequest: {"messages": [{"role": "user", "content": "x"}]},
    CompletionRequest: {"prompt": "x"},
    ResponsesRequest: {"input": "x"},
}


@pytest.mark.parametrize(
    ("params", "name", "shape"),
    [
        (chat_create_params, "CompletionCreateParams", ChatRequest),
        (completion_create_params, "CompletionCreateParams", CompletionRequest),
        (response_create_params, "ResponseCreateParams", ResponsesRequest),
    ],
)
def test_null_where_the_client_may_send_it(params: Any, name: str, shape: Any) -> None:
    """A field whose type in the client has None is as if it were left out."""
    for kind in ("NonStreaming", "Streaming"):
        for field, hint in get_type_hints(getattr(params, name + kind)).items():
            if type(None) in get_args(hint) and field not in NEEDED[shape]:
                body = msgspec.json.encode({**NEEDED[shape], field: None})
                found = BodyReader(shape).read({b"content-type": b"application/json"}, body)
                assert not getattr(found, field, None), field
