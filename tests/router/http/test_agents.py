"""What coding agents send is served with every family's template, and its cached prefix holds."""

from __future__ import annotations

import json
from bisect import bisect_left
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from tests.router.http.fake_engine import FakeEngine
from tests.router.http.recorded import claude_code, codex
from tests.router.http.served import served
from tests.router.text.families import FAMILIES, template_of
from tests.router.text.template_family import Family
from tgi_trio.router.http.engine_api import ServedLimits

pytestmark = pytest.mark.trio

LIMITS = ServedLimits(max_input_tokens=1 << 19, max_total_tokens=1 << 20, payload_limit=1 << 22)
COUNT = "/v1/messages/count_tokens"
BY_FORMAT = {family.format: family for family in FAMILIES}
BODIES: dict[str, tuple[str, Any]] = {
    "claude-code": ("/v1/messages", claude_code),
    "codex": ("/v1/responses", codex),
}


def engine(family: Family) -> FakeEngine:
    found = FakeEngine(lambda prompt: "Done.", limits=LIMITS)
    found.chat_template = template_of(family.name)
    found.tokens_per_step = 1000
    return found


def count_same(one: str, other: str) -> int:
    """Return how many characters two texts begin with alike."""
    found = bisect_left(range(len(one)), True, key=lambda n: not other.startswith(one[: n + 1]))
    return int(found)


async def test_the_bodies_are_of_the_size_that_agents_send() -> None:
    assert len(claude_code.TOOLS) == 24 and len(codex.TOOLS) == 9
    assert 60_000 < len(json.dumps(claude_code.TOOLS)) < 90_000
    assert 15_000 < len(json.dumps(codex.TOOLS)) < 30_000


@pytest.mark.sampled(9)
@pytest.mark.parametrize("agent", BODIES)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
async def test_a_session(family: Family, agent: str) -> None:
    path, sent = BODIES[agent]
    one = engine(family)
    async with served(one) as server:
        client = await server.connect()
        for body in (sent.FIRST, sent.THIRD):
            answer = await client.post(path + "?beta=true", body)
            assert answer.status == 200, answer.body
            last = answer.body.rpartition(b"event: ")[2].partition(b"\n")[0]
            assert last in (b"message_stop", b"response.completed"), answer.body[-500:]
        whole = await client.post(path, {**sent.SECOND, "stream": False})
        assert whole.status == 200, whole.body
        usage = whole.json()["usage"]
        assert usage["input_tokens"] == len(one.submitted[-1].prompt_ids)
        if path == "/v1/messages":
            count = await client.post(COUNT, sent.SECOND)
            assert count.json() == {"input_tokens": usage["input_tokens"]}
    first, third, second = one.prompts
    for text in ("What is in here?", "How to work." if agent == "claude-code" else "an agent"):
        assert [prompt.count(text) for prompt in (first, second, third)] == [1, 1, 1]
    for text in ("ls", "Thanks. And now?"):
        assert text in third
    assert "billing" not in first
    # Nothing that comes later changes the head of a prompt.
    for fewer, more in ((first, second), (second, third)):
        same = count_same(fewer, more)
        # Thoughts of a loop that has ended are left out by most templates.
        assert same > (0.97 if fewer is first else 0.9) * len(fewer)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("agent", BODIES)
@pytest.mark.parametrize("family", BY_FORMAT.values(), ids=list(BY_FORMAT))
async def test_their_tools_have_a_grammar(family: Family, agent: str) -> None:
    path, sent = BODIES[agent]
    one = engine(family)
    async with served(one) as server:
        client = await server.connect()
        assert (await client.post(path, sent.THIRD)).status == 200
    tokenizer = LLTokenizer(one.tokenizer._backend.to_str(), eos_token=1)
    matcher = LLMatcher(tokenizer, one.submitted[0].sampling.grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
