"""Halves of surrogate pairs in bodies: what JavaScript leaves of a text that it has cut."""

from __future__ import annotations

import json
import re
from typing import Any

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


SAID = {"messages": [{"role": "user", "content": "a?b"}]}


@pytest.mark.trio
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/", {"inputs": "a?b"}),
        ("/generate", {"inputs": "a?b"}),
        ("/generate_stream", {"inputs": "a?b"}),
        ("/invocations", {"inputs": "a?b"}),
        ("/invocations", SAID),
        ("/invocations", {"prompt": "a?b"}),
        ("/vertex", {"instances": [{"inputs": "a?b"}]}),
        ("/v1/chat/completions", SAID),
        ("/v1/completions", {"prompt": "a?b"}),
        ("/v1/responses", {"input": "a?b"}),
        ("/v1/messages", {"model": "tgi", "max_tokens": 9, **SAID}),
        ("/tokenize", {"inputs": "a?b"}),
        ("/tokenize", {"prompt": "a?b"}),
        ("/tokenize", SAID),
    ],
)
async def test_a_text_with_a_half_is_taken_as_one_with_its_replacement(
    path: str, body: dict[str, Any]
) -> None:
    """Wherever it comes: clients that cut texts do not choose the route by it."""
    prompts: list[str] = []

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        return "x"

    async with served(FakeEngine(answer)) as server:
        client = await server.connect()
        text = json.dumps(body)
        half = text.replace("a?", r"a\ud83d").encode()
        found, expected = [
            await client.post(path, sent) for sent in (half, text.replace("a?", "a\ufffd").encode())
        ]
        broken = await client.post(path, half[:-1])
    assert (found.status, expected.status, broken.status) == (200, 200, 400)
    if not prompts:
        assert found.body == expected.body
    else:
        assert len(prompts) == 2 and prompts[0] == prompts[1] and "a\ufffdb" in prompts[0]
