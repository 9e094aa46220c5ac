"""What a load records of one request, against a server that answers with given events."""

from __future__ import annotations

import json
from typing import Any

import trio

from tgi_trio.client.address import Address
from tgi_trio.client.http import Client
from tgi_trio.client.load import send_request
from tgi_trio.client.measures import RequestRecord


def recorded(events: list[dict[str, Any]], whole: dict[str, Any] | None) -> Any:
    """Return the record of a request that is answered with `events`, and its body."""
    asked: list[bytes] = []

    async def answer(stream: trio.SocketStream) -> None:
        received = b""
        while b"\r\n\r\n{" not in received or not received.endswith(b"}"):
            received += await stream.receive_some()
        asked.append(received.split(b"\r\n\r\n", 1)[1])
        lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        await stream.send_all(b"HTTP/1.1 200 OK\r\n\r\n" + lines.encode() + b"data: [DONE]\n\n")
        await stream.aclose()

    async def main() -> RequestRecord:
        async with trio.open_nursery() as nursery:
            listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
            port = listeners[0].socket.getsockname()[1]
            nursery.start_soon(trio.serve_listeners, answer, listeners)
            record = await send_request(Client(Address("127.0.0.1", port)), "hello", 9, whole)
            nursery.cancel_scope.cancel()
        return record

    return trio.run(main), json.loads(asked[0])


CHOICE = {"choices": [{"index": 0, "text": "a"}]}


def test_every_event_is_a_token() -> None:
    record, body = recorded([CHOICE, CHOICE, CHOICE], None)
    assert (record.tokens, len(record.events), record.error) == (3, 3, "")
    assert body["min_tokens"] == 9 and body["ignore_eos"] is True


def test_the_usage_counts_where_it_is_told() -> None:
    usage = {"choices": [], "usage": {"completion_tokens": 9}}
    record, body = recorded([CHOICE | {"usage": None}, CHOICE, usage], {"all": 1})
    assert (record.tokens, len(record.events)) == (9, 2)
    assert body["all"] == 1 and "ignore_eos" not in body


def test_an_error_ends_it() -> None:
    record, _ = recorded([CHOICE, {"error": {"message": "out of blocks"}}, CHOICE], None)
    assert record.tokens == 1 and "out of blocks" in record.error
