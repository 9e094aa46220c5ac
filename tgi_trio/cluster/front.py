"""The front as an ASGI application: a few routes of its own, all others proxied to a replica."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson
import trio

from tgi_trio.cluster.fleet import Fleet
from tgi_trio.cluster.members import MemberState
from tgi_trio.cluster.own_routes import OwnRoutes
from tgi_trio.cluster.relay import ClientRequest, Relay, Unserved
from tgi_trio.logs import show_path
from tgi_trio.router.http.api_keys import is_authorized
from tgi_trio.router.http.dispatch import Cors, RequestIds
from tgi_trio.router.http.messages.error_shapes import (
    ANTHROPIC,
    NATIVE,
    OPENAI,
    RESPONSES,
    ErrorShape,
    anthropic_error,
    openai_event,
)
from tgi_trio.router.http.messages.problems import Problem
from tgi_trio.router.http.sse import EventBody, StreamLimits
from tgi_trio.router.http.wire.headers import Header
from tgi_trio.router.http.wire.transport import EXTENSION, Receive, Send, Transport
from tgi_trio.router.telemetry.metrics import Metrics

access = logging.getLogger("tgi_trio.access")  # one line per request, at INFO

BODY_SECONDS: Final = 60.0  # a client may take this long to send its body
STREAM: Final = StreamLimits(backlog=1 << 20, silence=15.0)

# Hop-by-hop headers, and those that each connection sets anew.
_OF_A_HOP: Final = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade"),
        *(b"transfer-encoding", b"content-length", b"host", b"expect", b"date"),
    )
)
# Headers between fronts and replicas; a client's are removed.
_INTERNAL: Final = b"x-tgi-"

_OPEN_POSTS: Final = frozenset({"/chat_tokenize"})  # no key needed, as at the server

# Refused: they would load an adapter at one replica only.
_AT_REPLICAS: Final = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})

_SHAPES: Final[Sequence[tuple[str, ErrorShape]]] = (
    ("/v1/messages", ANTHROPIC),
    ("/v1/responses", RESPONSES),
    ("/v1/conversations", RESPONSES),
    ("/v1/", OPENAI),
)


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """The front's settings, as flags give them."""

    secret: bytes = b""  # shared with the replicas; empty: streams end with their replica
    api_keys: tuple[str, ...] = ()  # empty: no key is needed
    cors_allow_origin: tuple[str, ...] = ()  # empty: any
    payload_limit: int = 2_000_000  # bytes of a body
    max_concurrent_requests: int = 4096


class Front:
    """The application in front of a fleet."""

    def __init__(self, fleet: Fleet, metrics: Metrics, settings: FrontSettings) -> None:
        self.fleet = fleet
        self.settings = settings
        self.metrics = metrics
        self.running = 0
        self.retiring = False  # health is red
        self.draining = False  # new requests are refused
        self._idle = trio.Event()  # set when the last running request has ended
        self._ids = RequestIds()
        self._cors = Cors(settings.cors_allow_origin)
        self._seeds = random.SystemRandom()
        self._own = OwnRoutes(fleet, metrics, settings.secret)
        metrics.before_render(self._refresh)

    def retire(self) -> None:
        """Turn health red, so that a load balancer looks elsewhere; requests are still served."""
        self.retiring = True

    async def drain(self) -> None:
        """Graceful drain: refuse new requests, and wait until the running ones have ended."""
        self.retiring = self.draining = True
        while self.running:
            self._idle = trio.Event()
            await self._idle.wait()

    def _refresh(self) -> None:
        self.metrics.gauge("tgi_front_running", self.running)
        self.metrics.gauge("tgi_front_differing", len(self.fleet.differing))
        for state in MemberState:
            if state is not MemberState.GONE:
                count = self.fleet.members.count(state)
                self.metrics.gauge("tgi_front_replicas", count, state=state.value)

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Serve one request."""
        await _Request(self, scope, receive, send).serve()

    def name(self, headers: dict[bytes, bytes]) -> str:
        """Return a request's id."""
        return self._ids.name(headers)

    def cors_headers(self, headers: dict[bytes, bytes]) -> list[Header]:
        """Return the CORS headers for an answer of the front's own."""
        return self._cors.headers(headers)

    async def answer_itself(
        self, method: str, path: str, headers: dict[bytes, bytes], body: bytes
    ) -> tuple[int, bytes, bytes] | None:
        """Return status, content type and body; None if the route is not the front's own."""
        if self.retiring and method in ("GET", "HEAD") and path in ("/health", "/ready"):
            return 503, b"application/json", b'{"ready":false,"why":"the front shuts down"}'
        return await self._own.answer(method, path, headers, body)

    def seal(self) -> tuple[Header, ...]:
        """Return the headers that make a stream resumable elsewhere; none without a secret."""
        if not self.settings.secret:
            return ()
        return (
            (b"x-tgi-front", self.settings.secret),
            (b"x-tgi-seed", b"%d" % (self._seeds.getrandbits(62) + 1)),
            (b"x-tgi-began", b"%d" % time.time()),
        )

    def refuse(self, method: str, path: str, headers: dict[bytes, bytes]) -> Problem | None:
        """Return why a request is not sent to a replica; None if it is."""
        settings = self.settings
        asks_for_key = method == "POST" and path not in _OPEN_POSTS
        if asks_for_key and not is_authorized(headers, settings.api_keys):
            return Problem(
                401,
                "The API key is missing or wrong: send `Authorization: Bearer <key>` or "
                "`x-api-key: <key>`",
                "unauthorized",
            )
        if path in _AT_REPLICAS:
            return Problem(
                501,
                "Adapters are loaded at each replica, not through the front, which would load "
                "them at one of many",
                "unsupported",
            )
        if self.draining:
            return Problem(503, "The front shuts down", "unavailable", 1.0)
        if self.running >= settings.max_concurrent_requests:
            return Problem(429, "The front is overloaded", "overloaded", 1.0)
        return None

    def count_end(self) -> None:
        """Note that a request has ended."""
        self.running -= 1
        if not self.running:
            self._idle.set()


class _Request:
    """One request through the front."""

    def __init__(self, front: Front, scope: Any, receive: Receive, send: Send) -> None:
        self._front = front
        self._metrics = front.metrics
        self._method: str = scope["method"]
        self._path: str = scope["path"]
        query: bytes = scope["query_string"]
        raw: bytes = scope.get("raw_path") or self._path.encode()
        self._target = b"%b?%b" % (raw, query) if query else raw
        self._listed: list[Header] = list(scope["headers"])
        self._headers: dict[bytes, bytes] = dict(self._listed)
        self._client = scope.get("client")
        self._transport: Transport = scope["extensions"][EXTENSION]
        self._receive, self._send = receive, send
        self._id = front.name(self._headers)
        self._shape = next((s for p, s in _SHAPES if self._path.startswith(p)), NATIVE)
        self._began = trio.current_time()
        self._serving = trio.CancelScope(deadline=self._began + BODY_SECONDS)
        self._left = False

    async def serve(self) -> None:
        """Read the body, and answer."""
        with self._serving:
            body = await self._read_body()
            self._serving.deadline = math.inf
            if body is not None:
                self._transport.on_leave(self._leave)
                await self._answer(body)
        if self._serving.cancelled_caught and not self._left:
            await self._tell(
                Problem(408, "The request body did not arrive in time", "invalid_body")
            )

    def _leave(self) -> None:
        self._left = True
        self._serving.cancel()

    async def _read_body(self) -> bytes | None:
        """Return the body; None if it was refused, or the client disconnected."""
        limit = self._front.settings.payload_limit
        announced = self._headers.get(b"content-length", b"0")
        pieces, size = [], 0
        if announced.isdigit() and int(announced) <= limit:
            await self._transport.invite_body()
            while True:
                message = await self._receive()
                if message["type"] != "http.request":
                    return None
                pieces.append(message.get("body", b""))
                size += len(pieces[-1])
                if size > limit:
                    break
                if not message.get("more_body", False):
                    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._serving.deadline = math.inf
        text = f"The request's body is longer than --payload-limit of the front, {limit} bytes"
        await self._tell(Problem(413, text, "invalid_body"))
        return None

    async def _answer(self, body: bytes) -> None:
        front = self._front
        own = await front.answer_itself(self._method, self._path, self._headers, body)
        if own is not None:
            status, kind, text = own
            await self._reply(status, [(b"content-type", kind)], text)
            return
        refusal = front.refuse(self._method, self._path, self._headers)
        if refusal is not None:
            await self._tell(refusal)
            return
        front.running += 1
        relay = Relay(front.fleet, self._read_request(body), self._metrics)
        self._metrics.inc("tgi_front_requests")
        status = 499  # logged if the client disconnects first
        try:
            status = await self._relay(relay)
        finally:
            relay.close()
            front.count_end()
            if self._left:
                self._metrics.inc("tgi_front_cancelled")
            self._log(relay, status)

    def _read_request(self, body: bytes) -> ClientRequest:
        headers = [
            (name, value)
            for name, value in self._listed
            if name not in _OF_A_HOP and not name.startswith(_INTERNAL) and name != b"x-request-id"
        ]
        headers.append((b"x-request-id", self._id.encode("latin-1")))
        seal = self._front.seal() if self._method == "POST" else ()
        return ClientRequest(self._method, self._target, headers, body, self._id, seal, self._began)

    async def _relay(self, relay: Relay) -> int:
        """Send the client a replica's answer; returns the status."""
        began = trio.current_time()
        try:
            answer = await relay.start()
        except Unserved as error:
            self._metrics.inc("tgi_front_unserved")
            await self._tell(self._problem(error))
            return error.status
        self._metrics.observe("tgi_front_first_byte_duration", trio.current_time() - began)
        headers = [
            (name, value)
            for name, value in answer.head.headers
            if name not in _OF_A_HOP and not name.startswith(_INTERNAL)
        ]
        if answer.body is not None:
            await self._reply(answer.head.status, headers, answer.body, own=False)
        else:
            await self._stream(relay, headers)
        return answer.head.status

    async def _stream(self, relay: Relay, headers: list[Header]) -> None:
        body = EventBody(STREAM)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._pump, relay, body)
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._transport.flush()
            rest = await body.run(self._send, self._transport)
            nursery.cancel_scope.cancel()
        if body.failed:
            await self._transport.abort()
            return
        self._transport.on_leave(None)  # a client that has all of its answer may disconnect
        await self._send({"type": "http.response.body", "body": rest, "more_body": False})

    async def _pump(self, relay: Relay, body: EventBody) -> None:
        try:
            await relay.pump(body)
        except Unserved as error:
            self._metrics.inc("tgi_front_unserved")
            body.finish(self._error_event(self._problem(error)))
        else:
            body.finish(b"")

    # ---- the front's own answers ----------------------------------------------------------------

    def _problem(self, error: Unserved) -> Problem:
        return Problem(error.status, str(error), "unavailable", 1.0)

    def _error_event(self, problem: Problem) -> bytes:
        if self._shape is ANTHROPIC:
            status = self._shape.status(problem)
            return b"event: error\ndata: %b\n\n" % orjson.dumps(anthropic_error(problem, status))
        if self._shape is RESPONSES:
            error = {"type": "error", "code": "server_error", "message": problem.error}
            return b"event: error\ndata: %b\n\n" % orjson.dumps({**error, "param": None})
        if self._shape is OPENAI:
            return openai_event(problem, self._id)
        return problem.native_event()

    async def _tell(self, problem: Problem) -> None:
        shape = self._shape
        headers = [(b"content-type", b"application/json"), *problem.headers()]
        headers += shape.headers(self._id)
        body = shape.body(problem, self._id)
        if problem.status == 401 and shape.bare:
            headers, body = [], b""
        await self._reply(shape.status(problem), headers, body)

    async def _reply(
        self, status: int, headers: list[Header], body: bytes, own: bool = True
    ) -> None:
        """Send a whole answer; `own`: the front's, which gets the CORS headers and the id here."""
        if own:
            headers += self._front.cors_headers(self._headers)
            headers.append((b"x-request-id", self._id.encode("latin-1")))
        headers.append((b"content-length", b"%d" % len(body)))
        self._transport.on_leave(None)
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def _log(self, relay: Relay, status: int) -> None:
        if access.isEnabledFor(logging.INFO):
            extra = {
                "request_id": self._id,
                "client": self._client[0] if self._client else "local",
                "seconds": round(trio.current_time() - self._began, 6),
                "replica": relay.replica.name if relay.replica is not None else "none",
            }
            access.info("%s %s %d", self._method, show_path(self._path), status, extra=extra)
