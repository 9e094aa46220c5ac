"""Every refusal counts once in `tgi_request_failure`, whichever part refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.router.http.fake_engine import FakeEngine
from tests.router.http.served import served
from tgi_trio.errors import Draining, GrammarError, Overloaded, TgiTrioError, Unavailable

pytestmark = pytest.mark.trio

GRAMMAR = {"type": "regex", "value": "a"}
CHAT = {"messages": [{"role": "user", "content": "x"}], "response_format": GRAMMAR}
CALLS = [
    ("/generate", {"inputs": "x", "parameters": {"grammar": GRAMMAR}}),
    ("/generate", {"inputs": ["x", "y"], "parameters": {"grammar": GRAMMAR}}),
    ("/generate_stream", {"inputs": "x", "parameters": {"grammar": GRAMMAR}}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "stream": True, "n": 2}),
    ("/v1/completions", {"prompt": ["x", "y"], "response_format": GRAMMAR}),
    ("/vertex", {"instances": [{"inputs": "x", "parameters": {"grammar": GRAMMAR}}]}),
]


def refusing(part: str, error: TgiTrioError) -> FakeEngine:
    """Return an engine of which one part refuses everything."""

    def refuse(*given: object) -> None:
        raise error

    async def refuse_grammar(grammar: str, tokenizer: Path | None) -> None:
        raise error

    fake = FakeEngine()
    places: dict[str, Callable[[], None]] = {
        "permit": lambda: setattr(fake, "permit", refuse),
        "grammar": lambda: setattr(fake.validator, "_check_grammar", refuse_grammar),
        "queue": lambda: setattr(fake, "submit", refuse),
    }
    places[part]()
    return fake


@pytest.mark.parametrize(("path", "body"), CALLS)
@pytest.mark.parametrize(
    ("part", "error", "status", "cause"),
    [
        ("permit", Overloaded(), 429, "overloaded"),
        ("permit", Draining("it drains"), 503, "unavailable"),
        ("grammar", Overloaded("too many grammars"), 429, "overloaded"),
        ("grammar", Unavailable("no CPU time", 12.0), 503, "unavailable"),
        ("grammar", GrammarError("bad"), 422, "validation"),
        ("queue", Overloaded("The request's deadline cannot be met"), 429, "overloaded"),
    ],
)
async def test_a_refusal_counts_once(path, body, part, error, status, cause):
    async with served(refusing(part, error)) as server:
        client = await server.connect()
        answer = await client.post(path, body)
        values = {
            each: server.engine.metrics.value("tgi_request_failure", err=each)
            for each in ("overloaded", "unavailable", "validation", "generation")
        }
    told_in_event = path == "/generate_stream" and not isinstance(error, Draining)
    assert answer.status == (200 if told_in_event else status)
    assert values == {**dict.fromkeys(values, 0), cause: 1}
    if isinstance(error, Unavailable) and answer.status == 503:
        assert answer.headers["retry-after"] == f"{error.retry_after:g}"


async def test_what_a_route_refuses_counts_too():
    async with served() as server:
        client = await server.connect()
        answer = await client.post("/v1/completions", {"prompt": ["x"] * 9})
        unknown = await client.post("/v1/completions", {"prompt": "x", "model": "other"})
        value = server.engine.metrics.value("tgi_request_failure", err="validation")
    assert (answer.status, unknown.status, value) == (422, 404, 1)
