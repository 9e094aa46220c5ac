"""Answers that break off or are none: one kind of error, with a sentence that says what came."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import pytest
import trio

from tgi_trio.client.address import Address
from tgi_trio.client.http import Client
from tgi_trio.client.load import send_request

pytestmark = pytest.mark.trio

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices":[{"text":"a"}]}\n\n'


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def events_of(answer: bytes, found: list[Any]) -> str:
    """Put the events of an answer into `found`; return why it breaks off, "" if it does not.

    And look at what `bench` records of it: the same.
    """

    async def serve(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(answer)
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, serve, listeners)
        client = Client(Address("127.0.0.1", listeners[0].socket.getsockname()[1]))
        why = ""
        try:
            async with aclosing(client.events("/v1/completions", {})) as events:
                async for _, event in events:
                    found.append(event)
        except trio.BrokenResourceError as error:
            why = str(error)
        record = await send_request(client, "hello", 9)
        nursery.cancel_scope.cancel()
    assert record.error == (why and f"BrokenResourceError: {why}")
    return why


@pytest.mark.parametrize(
    ("answer", "whole", "why"),
    [
        (HEAD + chunk(EVENT) + b"0\r\n\r\n", 1, ""),
        (HEAD + chunk(EVENT), 1, "the connection ended within the answer"),
        (HEAD + chunk(EVENT)[:9], 0, "the connection ended within the answer"),
        (HEAD[:20], 0, "the connection ended within the answer"),
        (b"", 0, "the connection ended within the answer"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", 0, "the answer is no HTTP: "),
        (b"\x16\x03\x01\r\n\r\n", 0, "the answer is no HTTP: "),
        (HEAD + b"what\r\n", 0, "the answer is no HTTP: "),
        (HEAD + chunk(EVENT + b"data: {a\n\n"), 1, "an event is no JSON object: {a"),
        (HEAD + chunk(EVENT + b"data: [1]\n\n"), 1, "an event is no JSON object: [1]"),
        (HEAD + chunk(b"data: " + b"x" * 999 + b"\n\n"), 0, f"no JSON object: {'x' * 60}..."),
        (b"HT", 0, "the connection ended within the answer"),
        (b"HTTP/1.1 two hundred\r\n\r\n", 0, "the answer is no HTTP: "),
        (HEAD + chunk(b'data: {"other":1}\n\n') + b"0\r\n\r\n", 1, ""),
    ],
    ids=range(14),
)
async def test_what_breaks_an_answer_off_is_said(answer: bytes, whole: int, why: str) -> None:
    found: list[Any] = []
    said = await events_of(answer, found)
    assert len(found) == whole
    assert (why in said) if why else not said
