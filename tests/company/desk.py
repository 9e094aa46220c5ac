"""The router's application before a house's engine, and clients that call it without sockets."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import trio
import trio.testing

from tests.company.bodies import LOADED, VISIT, ClientCall
from tgi_trio.router.http.app import Application

_THINKS_S: Final = 0.03  # between an answer and what a client asks next
_NOT_FOUND, _FAILED = 404, 500
_NUMBERED: Final = re.compile(LOADED.encode() + rb"-\d{4}")  # names that are others in each visit


@dataclass
class Exchange:
    """A request, and what its client has been told."""

    call: ClientCall
    status: int = 0
    sent_whole: bool = False  # a conversation of which the server has not kept what came before
    pieces: list[bytes] = field(default_factory=list)

    @property
    def told(self) -> list[Any]:
        """Events, or a whole body, as JSON; what is no JSON as text."""
        whole = _NUMBERED.sub(LOADED.encode(), b"".join(self.pieces))
        if not whole.startswith((b"data:", b"event:", b":")):
            if not whole.startswith((b"{", b"[")):
                return [whole.decode()] if whole else []
            return [msgspec.json.decode(whole)]
        lines = (line for each in whole.split(b"\n\n")[:-1] for line in each.split(b"\n"))
        data = [line.removeprefix(b"data:").strip() for line in lines if line.startswith(b"data:")]
        return ["done" if each == b"[DONE]" else msgspec.json.decode(each) for each in data]

    @property
    def response(self) -> dict[str, Any]:
        """The whole response of OpenAI's newer route; {}: none has been told."""
        last = self.told[-1] if self.told else None
        found = last.get("response", last) if isinstance(last, dict) else {}
        ended = found.get("status") in ("completed", "incomplete")
        return found if found.get("object") == "response" and ended else {}


class Visit:
    """A client's calls, one after the other, and what it has been told."""

    def __init__(self, call: ClientCall, number: int = 0, patience: float | None = None) -> None:
        """`number`: of no other visit; `patience`: seconds that a request may take."""
        self.exchanges: list[Exchange] = []
        self.is_over = False
        self.turns = 0  # that it has been here for
        self._calls = (*call.before, call, *call.then)
        self._first = len(call.before)
        self._number = f"{number:04}"
        self._patience = patience
        self._left = trio.Event()

    @property
    def streams(self) -> bool:
        """Whether it is told of tokens as they come."""
        return self._calls[self._first].streams

    @property
    def has_left(self) -> bool:
        """Whether it has gone before it was told everything."""
        return self._left.is_set()

    @property
    def events(self) -> int:
        """What it has been told so far, in events; of a body in turns that it has waited for it."""
        return sum(len(each.pieces) for each in self.exchanges) if self.streams else self.turns

    def leave(self) -> None:
        """Go, whatever has been told."""
        self._left.set()

    async def call(self, app: Application) -> None:
        """Call, and wait for the end."""
        try:
            for call in self._calls:
                if call.of is not None and not self._response(call.of):
                    break  # there is nothing that it could go on from
                exchange = Exchange(call)
                self.exchanges.append(exchange)
                await self._ask(app, exchange, self._body(call))
                if exchange.status == _NOT_FOUND and call.body is not None and call.of is not None:
                    # What it goes on from is not kept: it is asked for the whole conversation.
                    exchange.pieces.clear()
                    exchange.sent_whole = True
                    given = self._conversation(call.of) + _list_items(call.body["input"])
                    body = self._encode({**call.body, "input": given})
                    await self._ask(app, exchange, body)
                with trio.move_on_after(_THINKS_S):
                    await self._left.wait()
                if self._left.is_set() or exchange.status >= _FAILED:
                    break
        finally:
            self.is_over = True

    def _response(self, number: int) -> dict[str, Any]:
        """Return the response to one of its calls, as `of` counts them."""
        return self.exchanges[self._first + number].response

    def _body(self, call: ClientCall) -> bytes:
        if call.body is None:
            return b""
        before = {}
        if call.of is not None:
            before["previous_response_id"] = self._response(call.of)["id"]
        return self._encode({**call.body, **before})

    def _encode(self, body: Any) -> bytes:
        return json.dumps(body).replace(VISIT, self._number).encode()

    def _conversation(self, number: int) -> list[Any]:
        """Return all up to one of its answers, as items."""
        call = self.exchanges[self._first + number].call
        assert call.body is not None
        before = [] if call.of is None else self._conversation(call.of)
        return [*before, *_list_items(call.body["input"]), *self._response(number)["output"]]

    async def _ask(self, app: Application, exchange: Exchange, body: bytes) -> None:
        call, sent = exchange.call, False
        path = call.path
        if call.of is not None:
            path = path.format(id=self._response(call.of)["id"])
        length = b"%d" % len(body)
        headers = [(b"content-type", b"application/json"), (b"content-length", length)]
        if self._patience is not None:
            headers.append((b"x-request-timeout", b"%f" % self._patience))
        scope = {
            **{"type": "http", "method": call.method, "path": path, "http_version": "1.1"},
            **{"query_string": b"", "scheme": "http", "headers": headers},
        }

        async def receive() -> dict[str, Any]:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": body, "more_body": False}
            await self._left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
            elif found := message.get("body", b""):
                exchange.pieces.append(bytes(found))

        await app(scope, receive, send)  # type: ignore[arg-type]


def _list_items(given: Any) -> list[Any]:
    """Return an `input` as items."""
    return [{"role": "user", "content": given}] if isinstance(given, str) else list(given)


class Desk:
    """Takes the calls of a house's guests, one life long."""

    def __init__(self, app: Application, nursery: trio.Nursery) -> None:
        self.app = app
        self._nursery = nursery

    async def begin(self, visit: Visit) -> None:
        """Begin a call; returns once it waits for something."""
        self._nursery.start_soon(visit.call, self.app)
        await trio.testing.wait_all_tasks_blocked()
