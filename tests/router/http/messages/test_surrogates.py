"""Halves of surrogate pairs in bodies: what JavaScript leaves of a text that it has cut."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.router.http.fake_engine import FakeEngine
from tests.router.http.served import served
from tgi_trio.router.http.messages.surrogates import mend_surrogates

# Code units, halves of pairs among them, as escapes or as they are; backslashes and letters that
# look like escapes.
PIECES = st.sampled_from(
    [r"\ud83d", r"\uDE00", r"\ude00", r"\\", r"\n", "ud83d", "ude00", "a", "é", r"\u00e9", r"\""]
)


@given(pieces=st.lists(PIECES, max_size=8))
@example(pieces=[r"\ud83d", r"\ud83d", r"\ude00", r"\ude00"])
@example(pieces=[r"\\", "ud83d", r"\ud83d"])
def test_a_half_becomes_a_mark_and_all_else_stays(pieces: list[str]) -> None:
    text = "".join(pieces)
    # Python's reader keeps halves, and joins those that are a pair.
    expected = re.sub("[\ud800-\udfff]", "\ufffd", json.loads(f'"{text}"'))
    mended = mend_surrogates(f'{{"a":"{text}"}}'.encode())
    assert json.loads(mended or f'{{"a":"{text}"}}') == {"a": expected}
    assert (mended is None) == ("\ufffd" not in expected)


@pytest.mark.trio
@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a?b"}]}, 200),
        ("/v1/completions", {"prompt": "a?b"}, 200),
        ("/v1/responses", {"input": "a?b"}, 200),
        (
            "/v1/messages",
            {"model": "tgi", "max_tokens": 9, "messages": [{"role": "user", "content": "a?"}]},
            200,
        ),
        ("/generate", {"inputs": "a?b"}, 400),  # TGI's
    ],
)
async def test_a_history_with_a_half_goes_on(path, body, status):
    prompts: list[str] = []

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        return "x"

    engine = FakeEngine(answer)
    async with served(engine) as server:
        client = await server.connect()
        sent = json.dumps(body).replace("a?", r"a\ud83d").encode()
        whole = await client.post(path, sent)
        broken = await client.post(path, sent[:-1])
    assert (whole.status, broken.status) == (status, 400)
    if status == 200:
        (prompt,) = prompts
        assert "a\ufffd" in prompt
