"""Answers that documents show behind `curl` commands are those of the embedded model."""

from __future__ import annotations

import re

import httpx
import orjson
import pytest

from tests.cli.test_docs import ROOT
from tests.router.http.test_documented_requests import BLOCK, CURL, list_requests
from tests.system.server import ServerProcess

pytestmark = pytest.mark.system

PAGES = ("README.md", "docs/thinking.md", "docs/tool-calls.md")
# Names of answers and of calls are drawn.
DRAWN = (r"chatcmpl\-1f0c", r"chatcmpl\-\\w+"), (r'"id":"\w{9}"', r'"id":"\\w{9}"')


def shown_answer(document: str) -> str:
    """Return what a page shows behind its first command that asks, `...` for what is left out."""
    for block in BLOCK.findall((ROOT / document).read_text()):
        if command := CURL.search(block):
            return str(block[command.end() :]).strip()
    raise LookupError(document)


def as_pattern(shown: str) -> str:
    """Return an expression for an answer; `...` and the ends of lines stand for anything."""
    pieces = (re.escape(piece) for piece in re.split(r"\.{3}|\n", shown))
    pattern = ".*?".join(pieces)
    for drawn, expression in DRAWN:
        pattern = re.sub(drawn if drawn.startswith('"') else re.escape(drawn), expression, pattern)
    return pattern


@pytest.mark.parametrize("document", PAGES)
def test_the_answer_that_is_shown_comes(document: str, served: ServerProcess) -> None:
    asked = next(each for each in list_requests(document) if each.body)
    body = orjson.loads(asked.body or b"") | {"temperature": 0}
    answer = httpx.post(f"{served.url}{asked.path}", json=body, timeout=120)
    shown = shown_answer(document)
    assert len(shown) > 80
    assert re.search(as_pattern(shown), answer.text, re.DOTALL), answer.text
