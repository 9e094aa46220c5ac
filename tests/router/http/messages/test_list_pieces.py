"""Large bodies, whose lists are read in pieces, are what they are as a whole, and so are errors."""

from __future__ import annotations

from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tgi_trio.errors import TgiTrioError
from tgi_trio.router.http.dialects.anthropic.schema import MessagesRequest
from tgi_trio.router.http.dialects.responses.schema import ResponsesRequest
from tgi_trio.router.http.messages import list_pieces
from tgi_trio.router.http.messages.body_reader import LARGE, BodyReader
from tgi_trio.router.http.messages.list_pieces import ListPieces, encode_list
from tgi_trio.router.http.messages.problems import BodyRejected
from tgi_trio.router.http.messages.schema import ChatRequest, CompletionRequest, GenerateRequest

HEADERS = {b"content-type": b"application/json"}
_RAW = msgspec.json.Decoder(dict[str, msgspec.Raw])

TEXTS = st.text(max_size=40) | st.sampled_from(["[", ']"', "\\", '{"', "é\u2028", ",", "#"])
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant"]),
            "content": TEXTS | st.lists(st.fixed_dictionaries({"type": TEXTS, "text": TEXTS})),
        }
    ),
    max_size=200,
)
IDS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=3000)
PROMPTS = IDS | st.lists(TEXTS, max_size=100) | st.lists(IDS, max_size=5) | TEXTS


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(list_pieces, "_LONG", 1)
    monkeypatch.setattr(list_pieces, "_PIECE", 64)


def in_pieces(shape: type, body: bytes) -> Any:
    return ListPieces(shape).decode(_RAW.decode(body))


def check_same(shape: type, fields: dict[str, Any], indent: bool) -> None:
    body = orjson.dumps(fields, option=orjson.OPT_INDENT_2 if indent else None)
    assert in_pieces(shape, body) == msgspec.json.decode(body, type=shape)


@given(st.lists(st.dictionaries(TEXTS, TEXTS | IDS, max_size=2), max_size=200))
@settings(max_examples=30, suppress_health_check=list(settings().suppress_health_check))
def test_a_list_that_is_written_in_pieces_is_as_in_one(tools: list[dict[str, Any]]) -> None:
    assert msgspec.json.encode({"tools": encode_list(tools)}) == orjson.dumps({"tools": tools})


@pytest.mark.usefixtures("short_pieces")
@given(MESSAGES, st.lists(TEXTS, max_size=50), st.booleans())
@settings(max_examples=60, suppress_health_check=list(settings().suppress_health_check))
def test_chats(messages: list[dict[str, Any]], stop: list[str], indent: bool) -> None:
    chat = {"messages": messages, "stop": stop, "model": "[x]", "unknown": [[1], {}]}
    check_same(ChatRequest, chat, indent)
    check_same(ResponsesRequest, {"input": messages}, indent)
    if messages:
        check_same(MessagesRequest, {"messages": messages, "model": "m", "max_tokens": 1}, indent)


@pytest.mark.usefixtures("short_pieces")
@given(PROMPTS, st.booleans())
@settings(max_examples=60)
def test_prompts(prompt: Any, indent: bool) -> None:
    check_same(CompletionRequest, {"prompt": prompt, "max_tokens": 3}, indent)
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], str)):
        check_same(GenerateRequest, {"inputs": prompt}, indent)


def long_chat(**last: Any) -> dict[str, Any]:
    message = {"role": "user", "content": "x" * 50}
    return {"messages": [message] * (LARGE // 50) + [{**message, **last}], "max_tokens": 5}


WRONG = [
    orjson.dumps(long_chat(role=1)),
    orjson.dumps(long_chat(content=[{"type": 5}])),
    orjson.dumps(long_chat() | {"max_tokens": "many"}),
    orjson.dumps({"max_tokens": "many"} | long_chat(role=None)),
    orjson.dumps(long_chat() | {"best_of": 3}),
    orjson.dumps({"model": "x" * LARGE}),
    orjson.dumps(long_chat())[:-1],
    orjson.dumps(long_chat())[:-20],
    orjson.dumps(long_chat()).replace(b"}]", b"},]"),
    orjson.dumps(long_chat()) + b"]",
    orjson.dumps(long_chat(content="CUT")).replace(b"CUT", b"\xff\xfe"),
    orjson.dumps(long_chat(content="CUT")).replace(b"CUT", b"\\ud800x"),
    orjson.dumps(long_chat(role=[])["messages"]),
    b"[" * (1 << 17),
    b'{"messages":' + b"[" * (1 << 17),
]


def read(reader: BodyReader, body: bytes) -> Any:
    try:
        return reader.read(HEADERS, body)
    except BodyRejected as error:
        return error.status, str(error), error.param
    except TgiTrioError as error:
        return type(error), str(error)


@pytest.mark.parametrize("body", WRONG, ids=range(len(WRONG)))
def test_errors_of_a_large_body_are_those_of_a_small_one(
    body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(body) >= LARGE
    found = read(BodyReader(ChatRequest), body)
    monkeypatch.setattr("tgi_trio.router.http.messages.body_reader.LARGE", len(body) + 1)
    assert found == read(BodyReader(ChatRequest), body)


class Spy:
    """Notes how much a decoder gets at a time."""

    def __init__(self, decoder: msgspec.json.Decoder[Any]) -> None:
        self.decoder = decoder
        self.sizes: list[int] = []

    def decode(self, data: bytes) -> Any:
        self.sizes.append(len(data))
        return self.decoder.decode(data)


@pytest.mark.parametrize(
    ("shape", "fields"),
    [
        (ChatRequest, {"messages": long_chat()["messages"] * 10}),
        (CompletionRequest, {"prompt": list(range(100_000))}),
    ],
)
def test_no_decoder_gets_more_than_a_piece(shape: type, fields: dict[str, Any]) -> None:
    """Others wait while it runs."""
    body, pieces = orjson.dumps(fields), ListPieces(shape)
    (name,) = fields
    whole, rest = Spy(pieces._whole), Spy(pieces._lists[name][1])
    pieces._whole = whole  # type: ignore[assignment]
    pieces._lists = {name: (name, rest)}  # type: ignore[dict-item]
    assert pieces.decode(_RAW.decode(body)) == msgspec.json.decode(body, type=shape)
    sizes = whole.sizes + rest.sizes
    assert len(sizes) > len(body) >> 16
    assert max(sizes) < 3 << 14
