"""Requests that documents show by `curl` are answered: by routes that are there, with 200."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import orjson
import pytest

from tests.cli.test_docs import PAGES, ROOT
from tests.router.http.fake_engine import GAP_MARKS, FakeEngine, byte_tokenizer
from tests.router.http.served import served
from tgi_trio.router.http.app import ROUTES
from tgi_trio.router.http.call import HttpSettings

pytestmark = pytest.mark.trio

BLOCK = re.compile(r"^```\w*\n(.+?)^```", re.DOTALL | re.MULTILINE)
CURL = re.compile(r"^(?:\$ )?curl .+?(?=^\$ |^\{|^data: |\Z)", re.DOTALL | re.MULTILINE)
SHOWN_ID = re.compile(r"\b(resp|conv)_9f0c\.\.\.")
KEPT = re.compile("/v1/(responses|conversations)")  # what is answered has an id to go on from
# Of adapters, and of a model that hears, which the fake engine does not have.
ELSEWHERE = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/audio/transcriptions")


@dataclass
class Asked:
    """One request of a `curl` command."""

    method: str
    path: str
    body: bytes | None

    def replace_ids(self, ids: Mapping[str, str]) -> Asked:
        """Return the request with what was answered before in place of ids that are shown."""
        path = SHOWN_ID.sub(lambda shown: ids[shown[1]], self.path)
        body = self.body and SHOWN_ID.sub(lambda shown: ids[shown[1]], self.body.decode()).encode()
        return Asked(self.method, path, body)


def read_command(words: list[str]) -> Asked:
    """Return what curl would ask with these words."""
    path, body, method = "", None, ""
    rest = iter(words)
    for word in rest:
        if word in ("-d", "--data"):
            body = next(rest).encode()
        elif word == "-F":
            body, _ = b"", next(rest)
        elif word == "-X":
            method = next(rest)
        elif word in ("-H", "-o"):
            next(rest)
        elif not word.startswith("-"):
            path = urlsplit(word if "://" in word else f"http://{word}").path
    return Asked(method or ("GET" if body is None else "POST"), path, body)


def list_requests(document: str) -> list[Asked]:
    """Return the requests to a server here that a document shows."""
    found = []
    for block in BLOCK.findall((ROOT / document).read_text()):
        for command in CURL.findall(block):
            text = command.removeprefix("$ ").replace("\\\n", " ")
            for one in re.split(r"; (?=curl )|\n(?=curl )", text):
                words = shlex.split(one, comments=True)
                if any("localhost:" in word for word in words):
                    found.append(read_command(words[1:]))
    return found


async def test_documents_show_some() -> None:
    assert sum(len(list_requests(document)) for document in PAGES) > 12


@pytest.mark.parametrize("document", [page for page in PAGES if list_requests(page)])
async def test_what_is_shown_is_answered(document: str) -> None:
    known = {(route.method, route.path) for route in ROUTES}
    engine = FakeEngine(lambda prompt: "Hi", tokenizer=byte_tokenizer(GAP_MARKS))
    async with served(engine, HttpSettings()) as server:
        client, ids = await server.connect(), dict[str, str]()
        for asked in list_requests(document):
            assert (asked.method, SHOWN_ID.sub("<id>", asked.path)) in known, asked
            asked = asked.replace_ids(ids)
            if asked.path in ELSEWHERE or b"adapter_id" in (asked.body or b""):
                continue
            if asked.body is None:
                answer = await client.get(asked.path)
            else:
                answer = await client.post(asked.path, orjson.loads(asked.body))
            assert answer.status == 200, (asked, answer.text)
            if KEPT.match(asked.path):
                id: str = answer.json()["id"]
                ids[id.partition("_")[0]] = id
