"""`batch`: what is asked, how often, and what is left when it is broken off."""

from __future__ import annotations

import errno
import io
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.router.http.fake_engine import FakeEngine
from tests.router.http.served import served
from tgi_trio.cli.batch import BatchRun, batch
from tgi_trio.cli.options import BatchOptions
from tgi_trio.client.address import Address
from tgi_trio.client.batch_files import BatchRow, append_line, keep_answers
from tgi_trio.client.http import Client
from tgi_trio.errors import ConfigurationError

pytestmark = pytest.mark.trio

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ROWS = [
    *(
        {"custom_id": f"c{i}", "method": "POST", "url": CHAT, "body": {"messages": [
            {"role": "user", "content": f"{i}"}]}}
        for i in range(5)
    ),
    {"custom_id": "t", "method": "POST", "url": TEXT, "body": {"prompt": "x"}},
    {"custom_id": "r", "method": "POST", "url": "/v1/responses", "body": {"input": "x"}},
]  # fmt: skip
WRONG = {"custom_id": "wrong", "method": "POST", "url": TEXT, "body": {"prompt": 5}}
VECTORS = {"custom_id": "v", "method": "POST", "url": "/v1/embeddings", "body": {"input": "x"}}


def options(folder: Path, rows: list[Any], port: int, **more: Any) -> BatchOptions:
    (folder / "in").write_text("".join(json.dumps(row) + "\n" for row in rows))
    url = f"http://127.0.0.1:{port}"
    return BatchOptions(input=folder / "in", output=folder / "out", url=url, **more)


def answers(folder: Path) -> dict[str, dict[str, Any]]:
    lines = (folder / "out").read_text().splitlines()
    found = {each["custom_id"]: each for each in map(json.loads, lines)}
    assert len(found) == len(lines)
    return found


async def test_all_are_answered_once(tmp_path: Path) -> None:
    fake = FakeEngine()
    async with served(fake) as server:
        given = options(tmp_path, [*ROWS, WRONG, VECTORS], server.port, clients=3)
        out = io.StringIO()
        assert not await batch(given, out)  # two are refused
        assert out.getvalue() == "9 rows: 7 200, 1 404, 1 422\n"
        found = answers(tmp_path)
        for id in ("c0", "c4", "t", "r"):
            response = found[id]["response"]
            assert response["status_code"] == 200 and response["request_id"]
            assert "Hello" in json.dumps(response["body"])
        assert found["wrong"]["response"]["status_code"] == 422
        assert "prompt" in found["wrong"]["response"]["body"]["error"]["message"]
        assert "makes no embeddings" in found["v"]["response"]["body"]["error"]["message"]
        before = (tmp_path / "out").read_bytes()
        again = io.StringIO()
        assert not await batch(given, again)  # they still are
        assert again.getvalue() == "9 rows: 9 before, none asked\n"
        assert (tmp_path / "out").read_bytes() == before and len(fake.submitted) == 7


async def test_one_that_is_broken_off_goes_on(tmp_path: Path, capsys: Any) -> None:
    fake = FakeEngine()
    async with served(fake, running=False) as server:
        given = options(tmp_path, ROWS, server.port, clients=2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(batch, given, io.StringIO())
            while not (tmp_path / "out").exists() or len(answers(tmp_path)) < 3:
                await trio.sleep(0.001)
                fake.step()
            nursery.cancel_scope.cancel()
        done = set(answers(tmp_path))
        assert 3 <= len(done) < 7
        assert f"{7 - len(done)} rows are left" in capsys.readouterr().err
        with (tmp_path / "out").open("a") as file:
            file.write('{"id": "batch_re')  # as a kill leaves it
        asked = len(fake.submitted)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fake.run)
            out = io.StringIO()
            assert await batch(given, out)
            nursery.cancel_scope.cancel()
        assert out.getvalue() == f"7 rows: {len(done)} before, {7 - len(done)} 200\n"
        assert len(fake.submitted) - asked == 7 - len(done)
        assert set(answers(tmp_path)) == {str(row["custom_id"]) for row in ROWS}


async def test_no_more_than_clients_are_asked_at_once(tmp_path: Path) -> None:
    fake = FakeEngine()
    most = 0
    async with served(fake, running=False) as server:
        async with trio.open_nursery() as nursery:

            async def run() -> None:
                assert await batch(options(tmp_path, ROWS, server.port, clients=2), io.StringIO())
                nursery.cancel_scope.cancel()

            nursery.start_soon(run)
            while True:
                await trio.sleep(0.001)
                most = max(most, len(fake.live))
                fake.step()
    assert most == 2


Serve = Callable[[trio.SocketStream], Any]


@asynccontextmanager
async def asking(serve: Serve, **more: Any) -> AsyncIterator[tuple[BatchRun, list[bytes]]]:
    """Yield a run of one row against a server, and its lines."""
    lines: list[bytes] = []
    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, serve, listeners)
        client = Client(Address("127.0.0.1", listeners[0].socket.getsockname()[1]))
        rows = iter([BatchRow("a", CHAT, b"{}")])
        given: dict[str, Any] = {"timeout": 60.0, "pauses": (0.0, 0.0), **more}
        yield BatchRun(client, rows, lines.append, lambda _: None, **given), lines
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("statuses", "kind"),
    [((429, 200), "200"), ((500, 503, 200), "200"), ((503, 503, 503), "503"), ((404,), "404")],
)
async def test_what_is_worth_it_is_asked_again(statuses: tuple[int, ...], kind: str) -> None:
    left = list(statuses)

    async def serve(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        head = f"HTTP/1.1 {left.pop(0)} X\r\nretry-after: 0\r\ncontent-length: 2\r\n\r\n"
        await stream.send_all(head.encode() + b"{}")

    async with asking(serve) as (run, lines):
        await run.ask_all(2)
    assert run.counts == {kind: 1} and not left
    assert str(json.loads(lines[0])["response"]["status_code"]) == kind


@pytest.mark.parametrize("begin", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{"])
async def test_an_answer_that_breaks_off_is_an_error(begin: bytes) -> None:
    asked: list[None] = []

    async def serve(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        asked.append(None)
        if begin:
            await stream.send_all(begin)
        await stream.aclose()

    async with asking(serve) as (run, lines):
        await run.ask_all(1)
    assert run.counts == {"connection_error": 1} and len(asked) == 3
    assert json.loads(lines[0])["error"]["code"] == "connection_error"


async def test_one_that_takes_too_long_is_an_error() -> None:
    async def serve(stream: trio.SocketStream) -> None:
        await trio.sleep_forever()

    async with asking(serve, timeout=0.05) as (run, lines):
        await run.ask_all(1)
    assert run.counts == {"request_timeout": 1}
    assert json.loads(lines[0])["error"]["message"] == "no answer within 0.05 s"


async def test_a_server_that_is_not_there_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Connection refused"):
        await batch(options(tmp_path, ROWS, 9), io.StringIO())
    assert (tmp_path / "out").read_bytes() == b""


async def test_a_disk_that_is_full_ends_the_run_with_its_name(tmp_path: Path) -> None:
    """It takes a part of a line first: what is asked again is cut off before."""

    class SmallDisk(io.FileIO):
        free = 100  # bytes

        def write(self, data: Any) -> int:
            if not self.free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            taken = super().write(memoryview(data)[: self.free])
            self.free -= taken
            return taken

    async def serve(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    path = tmp_path / "out"
    with SmallDisk(path, "ab") as file:
        async with asking(serve) as (run, _):
            run.write = partial(append_line, file)
            with pytest.raises(ConfigurationError) as raised:
                await run.ask_all(2)
    assert str(raised.value) == f"{path} cannot be written: No space left on device"
    assert path.stat().st_size == 100 and not run.counts
    assert not keep_answers(path) and path.read_bytes() == b""


async def test_without_a_server_nothing_is_written() -> None:
    async def serve(stream: trio.SocketStream) -> None:
        raise AssertionError

    async with asking(serve) as (run, lines):
        run.client = Client(Address("127.0.0.1", 9))
        with pytest.raises(OSError, match="Connection refused"):
            await run.ask_all(3)
    assert not lines and not run.counts
