"""The quart-trio application: routes, and how requests reach them.

Generation routes skip Quart's dispatch, which would cost as much as the rest of a request; the
same handlers are registered with Quart as well, which serves everything else and answers what no
route does. `HttpSettings.shortcut` switches the short way off.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import trio
from quart import Response, request
from quart.asgi import ASGIHTTPConnection
from quart.wrappers.response import ResponseBody
from quart_trio import QuartTrio
from quart_trio.asgi import TrioASGIHTTPConnection
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge, RequestTimeout

from tgi_trio.router.http.dispatch import Cors, RequestIds, answer, rejected
from tgi_trio.router.http.engine_api import Engine
from tgi_trio.router.http.errors import (
    BodyRejected,
    Header,
    internal,
    too_large,
    too_slow,
)
from tgi_trio.router.http.exchange import Call, HttpSettings, Reply, Route
from tgi_trio.router.http.routes import (
    chat,
    completions,
    kserve,
    native,
    operations,
    sagemaker,
    ui,
    vertex,
)
from tgi_trio.router.http.sse import EventBody
from tgi_trio.router.http.transport import Transport
from tgi_trio.router.receipt import Receipt
from tgi_trio.router.request import Timings
from tgi_trio.router.tracing import Exchange, Tracer

ROUTES: tuple[Route, ...] = (
    *native.ROUTES,
    *chat.ROUTES,
    *completions.ROUTES,
    *sagemaker.ROUTES,
    *vertex.ROUTES,
    *kserve.ROUTES,
    *operations.ROUTES,
    *ui.ROUTES,
)

access = logging.getLogger("tgi_trio.access")  # one line per request, at INFO

_SCOPE_KEY = "tgi_trio.connection"

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


class HttpConnection(TrioASGIHTTPConnection):
    """One request on its way through the application.

    Holds what the request holds: `resources` is closed synchronously when the client leaves or the
    request ends, whichever is first.
    """

    app: Application

    def __init__(self, app: Application, scope: Any) -> None:
        super().__init__(app, scope)
        self.resources = ExitStack()
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.request_id = app.request_ids.name(self.headers)
        self.began = trio.current_time()
        self.transport = Transport()
        self.generations: list[Timings] = []
        self.receipts: list[Receipt] = []
        self.watched = True  # a task of ours waits for hypercorn's `http.disconnect`

    async def __call__(self, receive: Receive, send: Send) -> None:
        """Serve the request."""
        self.transport = Transport.behind(send)
        scope = self.scope
        with self.resources:
            if scope["method"] == "OPTIONS":
                await self._transmit(send, self.app.cors.preflight())
                return
            route = self.app.shortcuts.get((scope["method"], scope["path"]))
            if route is not None:
                await self._shortcut(route, receive, send)
                return
            cast("dict[str, Any]", scope)[_SCOPE_KEY] = self
            await super().__call__(receive, send)

    def call(self, body: bytes, path: Mapping[str, str] | None = None) -> Call:
        """Return the request as routes see it."""
        return Call(
            engine=self.app.engine,
            settings=self.app.http,
            headers=self.headers,
            body=body,
            request_id=self.request_id,
            received=self.began,
            resources=self.resources,
            path=path or {},
            generations=self.generations,
            receipts=self.receipts,
        )

    # ---- the short way --------------------------------------------------------------------------

    async def _shortcut(self, route: Route, receive: Receive, send: Send) -> None:
        found: bytes | Reply | None = None
        with trio.CancelScope(deadline=self.began + self.app.http.body_timeout) as scope:
            try:
                found = await self._read_body(receive)
            except BodyRejected as error:
                found = rejected(error, route.openai)
            scope.deadline = math.inf
            leave = partial(self._leave, scope)
            if isinstance(found, bytes) and self.transport.on_leave(leave):
                self.watched = False
                await self._transmit(send, await answer(route, self.call(found)))
        if scope.cancelled_caught and self.watched:
            found = rejected(too_slow(), route.openai)
        if found is None or not self.watched:
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, receive, nursery.cancel_scope)
            if isinstance(found, bytes):
                found = await answer(route, self.call(found))
            await self._transmit(send, found)
            nursery.cancel_scope.cancel()

    def _leave(self, request: trio.CancelScope) -> None:
        """The client has left: free what the request holds, then end it."""
        # In this order, because the cancellation may have to wait for a send that is shielded.
        self.resources.close()
        request.cancel()

    async def _read_body(self, receive: Receive) -> bytes | None:
        """Return the body; None when the client left. Raises BodyRejected (413)."""
        limit = self.app.http.payload_limit
        expected = self._announced()
        if expected > limit:
            raise too_large()
        await self.transport.invite_body()
        pieces: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return None
            piece = message.get("body", b"")
            size += len(piece)
            if size > limit:
                raise too_large()
            if piece:
                pieces.append(piece)
            # The message that says that all was said is not worth another turn of the scheduler.
            if not message.get("more_body", False) or (expected and size == expected):
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _announced(self) -> int:
        """Return how many bytes of body the head of the request announces."""
        length = self.headers.get(b"content-length", b"")
        return int(length) if length.isdigit() else 0

    async def _watch(self, receive: Receive, request: trio.CancelScope) -> None:
        """End the request when its client has left."""
        while (await receive())["type"] != "http.disconnect":
            pass  # the rest of a body that was too large
        self._leave(request)

    # ---- Quart's way ----------------------------------------------------------------------------

    async def handle_messages(  # type: ignore[override]
        self, nursery: trio.Nursery, request: Any, receive: Receive
    ) -> None:
        """Feed the body to Quart's request; end the request when its client has left."""
        if self._announced() <= self.app.http.payload_limit:
            await self.transport.invite_body()
        await ASGIHTTPConnection.handle_messages(self, request, receive)
        self._leave(nursery.cancel_scope)

    async def _send_response(self, send: Send, response: Any) -> None:
        await self._transmit(send, await _reply_of(response))

    # ---- sending --------------------------------------------------------------------------------

    async def _transmit(self, send: Send, reply: Reply) -> None:
        try:
            await self._send_reply(send, reply)
        finally:
            if access.isEnabledFor(logging.INFO) or self.app.tracer is not None:
                self._tell(reply.status)

    def _tell(self, status: int) -> None:
        """Write the log line of the request, and its trace: probes and pages have none."""
        scope, client, ended = self.scope, self.scope.get("client"), trio.current_time()
        cost = Receipt.sum(self.receipts).fields() if self.receipts else {}
        extra = {
            "request_id": self.request_id,
            "client": client[0] if client else "local",
            "seconds": round(ended - self.began, 6),
            **cost,
        }
        if self.app.tracer is not None and scope["method"] == "POST":
            exchange = Exchange(
                method=scope["method"],
                path=scope["path"],
                status=status,
                headers=self.headers,
                began=self.began,
                ended=ended,
                generations=self.generations,
                attributes={"request_id": self.request_id, **cost},
                failed=sum(each.finished is not None for each in self.generations)
                > len(self.receipts),
            )
            extra["trace_id"] = self.app.tracer.record(exchange)
        access.info("%s %s %d", scope["method"], scope["path"], status, extra=extra)

    async def _send_reply(self, send: Send, reply: Reply) -> None:
        transport, body = self.transport, reply.body
        headers = self._headers(reply)
        if isinstance(body, bytes):
            headers.append((b"content-length", b"%d" % len(body)))
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        if isinstance(body, EventBody):
            await transport.flush()  # at once, so that proxies see life during a long prefill
            body_end = await body.run(send, transport)
            if body.failed:
                await transport.abort()
                return
        else:
            body_end = body
        # Given back before the client can know that it has its answer: its next request would
        # otherwise find the permit of this one still taken.
        self.resources.close()
        transport.on_leave(None)  # the next request may begin within the next line
        end = {"type": "http.response.body", "body": body_end, "more_body": False}
        if not self.watched:
            await send(end)
            return
        # After its last message hypercorn reports a disconnect, by which this very task would be
        # cancelled in the middle of recycling or closing the connection: keep-alive would never
        # time out, and clients that wait for the end of the connection would wait for ever.
        with trio.move_on_after(transport.send_timeout, shield=True):
            await send(end)

    def _headers(self, reply: Reply) -> list[Header]:
        headers = list(reply.headers)
        if reply.content_type:
            headers.insert(0, (b"content-type", reply.content_type))
        headers += self.app.cors.headers(self.headers)
        headers.append((b"x-request-id", self.request_id.encode("latin-1")))
        return headers


class Application(QuartTrio):
    """Routes of the server, all of them unless told otherwise, in front of one engine."""

    asgi_http_class = HttpConnection  # type: ignore[assignment]

    def __init__(
        self,
        engine: Engine,
        http: HttpSettings | None = None,
        tracer: Tracer | None = None,
        routes: Sequence[Route] = ROUTES,
    ) -> None:
        super().__init__("tgi_trio", static_folder=None)
        self.engine = engine
        self.http = http or HttpSettings()
        self.tracer = tracer
        self.cors = Cors(self.http.cors_allow_origin)
        self.request_ids = RequestIds()
        self.config["MAX_CONTENT_LENGTH"] = self.http.payload_limit
        self.config["BODY_TIMEOUT"] = self.http.body_timeout
        self.config["RESPONSE_TIMEOUT"] = None  # a generation takes as long as it takes
        self.config["PROVIDE_AUTOMATIC_OPTIONS"] = False  # OPTIONS is answered before routing
        self.url_map.merge_slashes = False
        self.shortcuts: dict[tuple[str, str], Route] = {}
        wanted = (*routes, *vertex.asked_for(self.http))  # the latter may replace one of ours
        for route in {(each.method, each.path): each for each in wanted}.values():
            self._register(route)
        self.register_error_handler(HTTPException, _http_error)
        self.register_error_handler(Exception, _defect)

    def _register(self, route: Route) -> None:
        async def view(**path: str) -> Response:
            connection = _connection()
            try:
                body = cast(bytes, await request.get_data(cache=False, as_text=False))
            except RequestEntityTooLarge:
                return _response(rejected(too_large(), route.openai))
            except RequestTimeout:
                return _response(rejected(too_slow(), route.openai))
            return _response(await answer(route, connection.call(body, path)))

        self.add_url_rule(
            route.path,
            endpoint=f"{route.method} {route.path}".replace(".", "_"),
            view_func=view,
            methods=[route.method],
            provide_automatic_options=False,
        )
        if route.method == "POST" and "<" not in route.path and self.http.shortcut:
            self.shortcuts[route.method, route.path] = route


def _connection() -> HttpConnection:
    """Return the connection of the request that Quart is serving."""
    found: HttpConnection = cast("dict[str, Any]", request.scope)[_SCOPE_KEY]
    return found


class ReplyResponse(Response):
    """Carries a Reply through Quart to `_send_response`."""

    reply: Reply


def _response(reply: Reply) -> Response:
    response = ReplyResponse(b"", status=reply.status)
    response.reply = reply
    return response


async def _reply_of(response: Any) -> Reply:
    """Return the Reply inside a response, or made from one of Quart's own."""
    if isinstance(response, ReplyResponse):
        return response.reply
    body = b""
    if isinstance(response, Response) and isinstance(response.response, ResponseBody):
        body = await response.get_data(as_text=False)
    headers = [
        (name.lower().encode("latin-1"), value.encode("latin-1"))
        for name, value in response.headers.items()
        if name.lower() not in ("content-length", "content-type")
    ]
    content_type = (response.content_type or "").encode("latin-1") if body else b""
    return Reply(body, response.status_code, content_type, headers)


async def _http_error(error: HTTPException) -> Response:
    """Answer what no route answers: like TGI without a body, or in its words."""
    headers: list[Header] = []
    for name, value in error.get_headers():
        if name.lower() == "allow":
            headers.append((b"allow", value.replace(" ", "").encode("latin-1")))
    return _response(Reply(b"", error.code or 500, b"", headers))


async def _defect(error: Exception) -> Response:
    connection = _connection()
    problem = internal(connection.request_id)
    return _response(Reply(problem.body(), problem.status))
