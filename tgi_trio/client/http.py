"""One request per connection over h11: a JSON body, or a stream of server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import h11
import orjson
import trio

from tgi_trio.client.address import Address, connect

_CHUNK: Final = 65536
_HTTP: Final = b"HTTP/"  # begins every answer
_SHOWN: Final = 60  # most characters of an event in its error
_CLOSING: Final = 1.0  # seconds for TLS's closing handshake


class HTTPFailure(Exception):
    """The server has answered with an error status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server has answered, with whatever status."""

    status: int
    body: bytes
    request_id: str = ""
    retry_after: float = 0.0  # seconds until another try may help


@dataclass(frozen=True, slots=True)
class Client:
    """A server's address and the API key for it."""

    address: Address
    api_key: str = ""

    async def get(self, path: str) -> Any:
        """Return the JSON at `path`. Raises HTTPFailure and OSError."""
        async with self._exchange("GET", path, b"") as exchange:
            return orjson.loads(await exchange.whole())

    async def post(self, path: str, payload: bytes) -> Answer:
        """POST JSON and return the answer, also one of an error.

        Raises OSError and trio.BrokenResourceError as `events` does.
        """
        async with self._exchange("POST", path, payload) as exchange:
            return await exchange.answer()

    async def events(
        self, path: str, body: Mapping[str, Any]
    ) -> AsyncGenerator[tuple[float, dict[str, Any]]]:
        """POST `body`; yield (arrival time on trio's clock, decoded event) for each `data:` line.

        Closing the generator closes the connection, which cancels the request. Raises HTTPFailure
        for a status other than 200, OSError where there is no connection, and
        trio.BrokenResourceError, with what came, where it or the answer breaks off.
        """
        async with self._exchange("POST", path, orjson.dumps(body)) as exchange:
            async with aclosing(exchange.events()) as events:
                async for at, data in events:
                    yield at, _read_event(data)

    @asynccontextmanager
    async def _exchange(self, method: str, path: str, payload: bytes) -> AsyncGenerator[_Exchange]:
        stream = await connect(self.address)
        try:
            exchange = _Exchange(stream, h11.Connection(h11.CLIENT))
            headers = [
                ("host", self.address.host),
                ("content-type", "application/json"),
                ("content-length", str(len(payload))),
            ]
            if self.api_key:
                headers.append(("authorization", f"Bearer {self.api_key}"))
            await exchange.send(method, self.address.prefix + path, headers, payload)
            yield exchange
        finally:
            with trio.move_on_after(_CLOSING if self.address.tls else 0, shield=True):
                await stream.aclose()


class _Exchange:
    """One request and its response on one connection."""

    def __init__(self, stream: trio.abc.Stream, connection: h11.Connection) -> None:
        self._stream = stream
        self._connection = connection
        self._begin = b""  # of all that was received
        self._ended = False  # no more is to come

    async def send(
        self, method: str, target: str, headers: list[tuple[str, str]], payload: bytes
    ) -> None:
        request = h11.Request(method=method, target=target, headers=headers)
        parts = [request, *([h11.Data(payload)] if payload else []), h11.EndOfMessage()]
        await self._stream.send_all(b"".join(self._connection.send(part) or b"" for part in parts))

    async def _next(self) -> Any:
        """Return h11's next event, never NEED_DATA."""
        try:
            while (event := self._connection.next_event()) is h11.NEED_DATA:
                piece = bytes(await self._stream.receive_some(_CHUNK))
                self._begin, self._ended = self._begin or piece[: len(_HTTP)], not piece
                self._connection.receive_data(piece)
        except h11.RemoteProtocolError as error:
            cut = self._ended and _HTTP.startswith(self._begin)
            why = (
                "the connection ended within the answer"
                if cut
                else f"the answer is no HTTP: {error}"
            )
            raise trio.BrokenResourceError(why) from error
        return event

    async def _pieces(self) -> AsyncGenerator[bytes]:
        """Yield the body's pieces. Raises HTTPFailure once the body of an error has been read."""
        status, refused = 200, b""
        while True:
            event = await self._next()
            if isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                if status == 200:
                    yield bytes(event.data)
                else:
                    refused += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
                if status != 200:
                    raise HTTPFailure(status, read_error(refused))
                return

    async def answer(self) -> Answer:
        response = await self._next()
        while not isinstance(response, h11.Response):
            if isinstance(response, h11.ConnectionClosed):
                raise trio.BrokenResourceError("the connection ended within the answer")
            response = await self._next()
        pieces: list[bytes] = []
        while isinstance(event := await self._next(), h11.Data):
            pieces.append(bytes(event.data))
        headers = {bytes(name): bytes(value) for name, value in response.headers}
        after = headers.get(b"retry-after", b"")
        return Answer(
            response.status_code,
            b"".join(pieces),
            headers.get(b"x-request-id", b"").decode("latin-1"),
            float(after) if after.isdigit() else 0.0,
        )

    async def whole(self) -> bytes:
        return b"".join([piece async for piece in self._pieces()])

    async def events(self) -> AsyncGenerator[tuple[float, bytes]]:
        buffer = b""
        async for piece in self._pieces():
            now = trio.current_time()
            *frames, buffer = (buffer + piece).split(b"\n\n")
            for frame in frames:
                data = frame.removeprefix(b"data:").strip()
                if frame.startswith(b"data:") and data != b"[DONE]":
                    yield now, data


def _read_event(data: bytes) -> dict[str, Any]:
    """Return an event. Raises trio.BrokenResourceError for what is no JSON object."""
    try:
        event = orjson.loads(data)
    except orjson.JSONDecodeError:
        event = None
    if not isinstance(event, dict):
        text = data.decode(errors="replace")
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
        raise trio.BrokenResourceError(f"an event is no JSON object: {shown}")
    return event


def read_error(body: bytes) -> str:
    """Return the message in an error's body: TGI's, OpenAI's or plain text."""
    try:
        error = orjson.loads(body)["error"]
    except (ValueError, TypeError, KeyError):
        return body[:300].decode(errors="replace")
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
