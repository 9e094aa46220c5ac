"""What fails in a way that nobody foresaw is a 500 whose request id the log knows, on every way."""

from __future__ import annotations

import logging
from typing import NoReturn

import pytest
import tokenizers

from tests.router.http.fake_engine import FakeEngine
from tests.router.http.served import served
from tgi_trio.errors import Overloaded
from tgi_trio.router.http.app import HttpRequest
from tgi_trio.router.http.bodies import WholeBody
from tgi_trio.router.http.call import HttpSettings

pytestmark = pytest.mark.trio

DEFECT = "no space left on device"


def logged(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """Return every error in the log: its message, and that of the exception it shows."""
    return [
        (record.getMessage(), str(record.exc_info[1]) if record.exc_info else "")
        for record in caplog.records
        if record.levelno >= logging.ERROR
    ]


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
async def test_a_body_that_cannot_be_kept_is_a_defect_that_the_log_describes(
    http: HttpSettings,
    path: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def finish(self: WholeBody) -> NoReturn:
        raise OSError(DEFECT)

    monkeypatch.setattr(WholeBody, "finish", finish)
    monkeypatch.setattr(HttpRequest, "_choose_body", lambda *_: (WholeBody(0), 0))
    async with served(http=http) as server:
        client = await server.connect()
        answer = await client.post(path, b"{}", x_request_id="one")
        assert answer.status == 500 and answer.headers["x-request-id"] == "one"
        assert "under request id one" in answer.body.decode()
        assert logged(caplog) == [("request one met a defect", DEFECT)]
        monkeypatch.undo()
        assert (await client.get("/health")).status == 200  # the connection is as good as before


async def test_who_cannot_have_room_for_a_body_is_told_to_come_back(
    http: HttpSettings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def finish(self: WholeBody) -> NoReturn:
        raise Overloaded("no room for it")

    monkeypatch.setattr(WholeBody, "finish", finish)
    monkeypatch.setattr(HttpRequest, "_choose_body", lambda *_: (WholeBody(0), 0))
    async with served(http=http) as server:
        client = await server.connect()
        answer = await client.post("/generate", b"{}")
        assert answer.status == 429 and "no room for it" in answer.body.decode()
    assert logged(caplog) == []


async def test_a_defect_of_quart_is_in_the_log_as_well(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrap(reply: object) -> NoReturn:
        monkeypatch.undo()
        raise RuntimeError(DEFECT)

    monkeypatch.setattr("tgi_trio.router.http.app.wrap_reply", wrap)
    async with served() as server:
        client = await server.connect()
        answer = await client.get("/info", x_request_id="two")
        assert answer.status == 500 and "under request id two" in answer.body.decode()
    assert logged(caplog) == [("request two met a defect", DEFECT)]


@pytest.mark.parametrize("count", [1, 1000], ids=["at once", "in a thread"])
async def test_a_panic_of_the_tokenizer_s_library_is_one_of_many_requests(
    count: int, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine()
    strip = tokenizers.decoders.Strip("x", 0, 5)  # more than there may be: a defect of theirs
    engine.tokenizer._backend.decoder = strip
    ids = [engine.tokenizer.token_id("x")] * count
    async with served(engine) as server:
        client = await server.connect()
        answer = await client.post("/detokenize", {"tokens": ids}, x_request_id="three")
        assert answer.status == 500 and "under request id three" in answer.body.decode()
        assert [each for each, _ in logged(caplog)] == ["request three met a defect"]
        assert (await client.get("/health")).status == 200
