"""A small streaming client on trio and h11: exact arrival times, little work per event."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import h11
import orjson
import trio

_CHUNK = 65536


class HTTPFailure(Exception):
    """The server answered with an error status."""


async def post_sse(
    host: str, port: int, path: str, body: dict[str, Any]
) -> AsyncIterator[tuple[float, dict[str, Any]]]:
    """POST `body` and yield (arrival time, decoded event) for each `data:` line.

    Closes the connection when it is left. Raises HTTPFailure for a status other than 200.
    """
    stream = await trio.open_tcp_stream(host, port)
    try:
        payload = orjson.dumps(body)
        connection = h11.Connection(h11.CLIENT)
        headers = [
            ("host", host),
            ("content-type", "application/json"),
            ("content-length", str(len(payload))),
        ]
        request = h11.Request(method="POST", target=path, headers=headers)
        head = connection.send(request) or b""
        await stream.send_all(head + (connection.send(h11.Data(payload)) or b""))
        connection.send(h11.EndOfMessage())
        status, buffer = 200, b""
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await stream.receive_some(_CHUNK))
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                now = trio.current_time()
                buffer += bytes(event.data)
                if status != 200:
                    continue
                *frames, buffer = buffer.split(b"\n\n")
                for frame in frames:
                    data = frame.removeprefix(b"data:").strip()
                    if frame.startswith(b"data:") and data != b"[DONE]":
                        yield now, orjson.loads(data)
            elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
                if status != 200:
                    raise HTTPFailure(f"{status}: {buffer[:300].decode(errors='replace')}")
                return
    finally:
        with trio.CancelScope(shield=True):
            await trio.aclose_forcefully(stream)
