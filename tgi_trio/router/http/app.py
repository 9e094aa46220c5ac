"""The quart-trio application: routes, and how requests reach them.

Every request takes the same way: `HttpRequest` reads the body, calls the route and sends the reply,
and the transport reports when the client leaves. Only finding the route differs. Routes that
generate have fixed paths and are looked up in a dictionary; all others, and paths without a route,
are dispatched by Quart, with which all routes are registered. Quart's dispatch makes a short
request half as expensive again (`ours-quart` in `bench.http`, docs/benchmarks/http.md), hence the
dictionary; `HttpSettings.shortcut` switches it off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, cast

import trio
from quart import Response, request
from quart.routing import QuartRule
from quart_trio import QuartTrio
from quart_trio.asgi import TrioASGIHTTPConnection
from werkzeug.exceptions import HTTPException

from tgi_trio.router.http.account import CLIENT_LEFT, RequestAccount
from tgi_trio.router.http.bodies import Body, PacedBody, WholeBody
from tgi_trio.router.http.call import Call, HttpSettings, Reply, Route
from tgi_trio.router.http.dispatch import (
    Cors,
    RequestIds,
    answer_call,
    reply_to_error,
    reply_to_unrouted,
    to_rejection,
)
from tgi_trio.router.http.engine_api import EngineApi
from tgi_trio.router.http.generation import log_defect
from tgi_trio.router.http.messages.body_images import SHORTEST, BodyCutter, CutBody
from tgi_trio.router.http.messages.problems import check_coding, internal, too_large, too_slow
from tgi_trio.router.http.quart_replies import unwrap_reply, wrap_reply
from tgi_trio.router.http.response_store import ResponseStore
from tgi_trio.router.http.routes import (
    adapters,
    chat,
    compaction,
    completions,
    conversations,
    fim,
    infill,
    kserve,
    messages,
    native,
    operations,
    responses,
    sagemaker,
    stored_responses,
    tokens,
    transcriptions,
    ui,
    vertex,
)
from tgi_trio.router.http.side_threads import SideThreads
from tgi_trio.router.http.wire.headers import Header
from tgi_trio.router.http.wire.pace import LoopPace
from tgi_trio.router.http.wire.transport import (
    EXTENSION,
    AsgiTransport,
    Receive,
    Send,
    Transport,
)
from tgi_trio.router.telemetry.tracing import Tracer

ROUTES: tuple[Route, ...] = (
    *native.ROUTES,
    *chat.ROUTES,
    *messages.ROUTES,
    *responses.ROUTES,
    *stored_responses.ROUTES,
    *compaction.ROUTES,
    *conversations.ROUTES,
    *completions.ROUTES,
    *fim.ROUTES,
    *infill.ROUTES,
    *transcriptions.ROUTES,
    *sagemaker.ROUTES,
    *vertex.ROUTES,
    *kserve.ROUTES,
    *tokens.ROUTES,
    *adapters.ROUTES,
    *operations.ROUTES,
    *ui.ROUTES,
)

_PATHS = frozenset(route.path for route in ROUTES)
_SCOPE_KEY = "tgi_trio.request"


class HttpRequest(TrioASGIHTTPConnection):
    """One request on its way through the application.

    Holds what the request holds: `resources` is closed synchronously when the client leaves or the
    request ends, whichever is first.
    """

    app: Application
    transport: Transport  # this and the next are set by the call
    _receive: Receive

    def __init__(self, app: Application, scope: Any) -> None:
        super().__init__(app, scope)
        self.resources = ExitStack()
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.account = RequestAccount(app.request_ids.name(self.headers), self.headers)
        self._route: Route | None = None  # the one that answers
        self._made: list[object] = []  # what a large body has become
        self._left = False
        self._answered = False  # a reply has begun
        # One scope for both things that end a request early: a slow body, and the client leaving.
        self._serving = trio.CancelScope(deadline=self.account.began + app.http.body_timeout)

    async def __call__(self, receive: Receive, send: Send) -> None:
        """Serve the request."""
        extensions = cast("dict[str, Any]", self.scope.get("extensions", {}))
        if EXTENSION in extensions:
            await self._serve(extensions[EXTENSION], receive, send)
            return
        async with trio.open_nursery() as nursery:  # another ASGI server, or a test client
            transport = AsgiTransport(nursery, receive, send)
            await self._serve(transport, transport.receive, transport.send)
            nursery.cancel_scope.cancel()

    async def _serve(self, transport: Transport, receive: Receive, send: Send) -> None:
        self.transport, self._receive = transport, receive
        self.app.serving += 1
        with ExitStack() as references, self.resources:
            references.callback(self.app.note_answered)
            # They refer to this request: no garbage may be left to be looked for.
            references.callback(cast("dict[str, Any]", self.scope).pop, _SCOPE_KEY, None)
            references.callback(transport.on_leave, None)
            references.callback(self.app.side_threads.free, self._made)
            with self._serving:
                await self._transmit(send, await self._find_reply(send))
            if self._left and not self._answered:
                self._close_account(CLIENT_LEFT)
            elif self._serving.cancelled_caught and self._route is not None and not self._left:
                await self._transmit(
                    send, to_rejection(too_slow(), self._route.dialect, self.account.request_id)
                )

    async def _find_reply(self, send: Send) -> Reply:
        """Return the reply: to OPTIONS, of a route in `shortcuts`, or found by Quart's dispatch."""
        scope = self.scope
        if scope["method"] == "OPTIONS":
            if scope["path"] == "/" and b"access-control-request-method" not in self.headers:
                return await self.answer(operations.PROBE)
            self._end_reading()
            return self.app.cors.preflight(self.headers)
        route = self.app.shortcuts.get((scope["method"], scope["path"]))
        if route is not None:
            return await self.answer(route)
        if scope["path"].startswith("//"):  # Quart takes several slashes in front for one
            self._end_reading()
            id, method, path = self.account.request_id, scope["method"], scope["path"]
            return reply_to_unrouted(404, method, path, id, served=_PATHS)
        cast("dict[str, Any]", scope)[_SCOPE_KEY] = self
        response = await self.app.handle_request(self._create_request_from_scope(send))
        self._end_reading()
        return await unwrap_reply(response)

    async def answer(self, route: Route, path: Mapping[str, str] | None = None) -> Reply:
        """Read the body and have `route` answer; `path` has the variables of the route's path."""
        self._route = route
        try:
            cut = await self._read_body(route)  # a body of megabytes is not kept for the answer
        except Exception as error:
            return reply_to_error(self._call(CutBody(b""), path), route.dialect, error)
        finally:
            self._end_reading()
        await self.app.pace.breathe()  # requests whose bodies end together begin one by one
        return await answer_call(route, self._call(cut, path))

    def _call(self, cut: CutBody, path: Mapping[str, str] | None) -> Call:
        return Call(
            engine=self.app.engine,
            settings=self.app.http,
            headers=self.headers,
            body=cut.body,
            cut=cut,
            request_id=self.account.request_id,
            received=self.account.began,
            resources=self.resources,
            responses=self.app.responses,
            path=path or {},
            query_string=self.scope["query_string"],
            generations=self.account.generations,
            all_stats=self.account.all_stats,
            turns=self.app.turns,
            pace=self.app.pace,
            side_threads=self.app.side_threads,
            made=self._made,
        )

    def _leave(self) -> None:
        """The client has left: free what the request holds, then end it."""
        self._left = True
        # In this order, because the cancellation may have to wait for a send that is shielded.
        self.resources.close()
        self._serving.cancel()

    # ---- the body -------------------------------------------------------------------------------

    async def _read_body(self, route: Route) -> CutBody:
        """Return the body, with large images cut out of it where the route takes images.

        Raises BodyRejected (413, 415), and OSError where images cannot be kept.
        """
        if coding := self.headers.get(b"content-encoding"):
            check_coding(coding)
        limit = self.app.http.payload_limit
        length = self.headers.get(b"content-length", b"")
        announced = int(length) if length.isdigit() else 0
        if announced > limit:
            raise too_large(limit)
        await self.transport.invite_body()
        body, least = self._choose_body(route, announced)
        sink = PacedBody(body, self.app.pace)
        size = 0
        while True:
            message = await self._receive()
            if message["type"] != "http.request":
                self._leave()
                await trio.sleep_forever()  # cancelled: there is nobody to answer
            piece: bytes = message.get("body", b"")
            size += len(piece)
            if size > limit:
                raise too_large(limit)
            ended = not message.get("more_body", False) or (announced and size == announced)
            if ended and size == len(piece) < least:
                return CutBody(piece)
            await sink.take(piece)
            if announced and not ended:
                size += await self.transport.receive_into(sink)
                ended = size == announced
            # What is still to come is a message that says only that the body has ended.
            if ended:
                return body.finish()

    def _choose_body(self, route: Route, announced: int) -> tuple[Body, float]:
        """Return what receives the body, and below how many bytes a body in one piece skips it."""
        images = self.app.engine.images if route.images else None
        if images is None:
            return WholeBody(announced), math.inf
        return self.resources.enter_context(BodyCutter(images.spool)), SHORTEST

    def _end_reading(self) -> None:
        """No more of the body is wanted: from now on the transport watches for a disconnect."""
        self._serving.deadline = math.inf
        self.transport.on_leave(self._leave)

    # ---- sending --------------------------------------------------------------------------------

    async def _transmit(self, send: Send, reply: Reply) -> None:
        self._answered = True
        try:
            await self._send_reply(send, reply)
        finally:
            self._close_account(reply.status)

    def _close_account(self, status: int) -> None:
        metrics, tracer = self.app.engine.metrics, self.app.tracer
        self.account.close(self.scope, self._route, status, metrics, tracer, self._left)

    async def _send_reply(self, send: Send, reply: Reply) -> None:
        transport, body = self.transport, reply.body
        headers = self._headers(reply)
        if isinstance(body, bytes):
            headers.append((b"content-length", b"%d" % len(body)))
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        if not isinstance(body, bytes):
            await transport.flush()  # at once, so that proxies see life during a long prefill
            body_end = await body.run(send, transport)
            if body.failed:
                await self.app.pace.breathe()  # a step may find many that have left at one time
                await transport.abort()
                return
        else:
            body_end = body
        # Before the client can know that it has its whole answer: its next request might otherwise
        # find the permit of this one still taken.
        self.resources.close()
        # A client that has its answer may go. Some servers report the end of an answer as a
        # disconnect, by which this very task would be cancelled in the middle of closing.
        transport.on_leave(None)
        await send({"type": "http.response.body", "body": body_end, "more_body": False})

    def _headers(self, reply: Reply) -> list[Header]:
        headers = list(reply.headers)
        if reply.content_type:
            headers.insert(0, (b"content-type", reply.content_type))
        headers += self.app.cors.headers(self.headers)
        headers.append((b"x-request-id", self.account.request_id.encode("latin-1")))
        return headers


class RouteRule(QuartRule):
    """A route in Quart's map. URLs are never built from routes, and compiling for that is slow."""

    def _compile_builder(self, append_unknown: bool = True) -> Callable[..., tuple[str, str]]:
        return _build_url


def _build_url(*_: object, **__: object) -> tuple[str, str]:
    raise RuntimeError("URLs of routes are not built here")


class Application(QuartTrio):
    """Routes of the server, all of them unless told otherwise, in front of one engine."""

    asgi_http_class = HttpRequest  # type: ignore[assignment]
    url_rule_class = RouteRule  # type: ignore[assignment]

    def __init__(
        self,
        engine: EngineApi,
        http: HttpSettings | None = None,
        tracer: Tracer | None = None,
        routes: Sequence[Route] = ROUTES,
    ) -> None:
        super().__init__("tgi_trio", static_folder=None)
        self.engine = engine
        self.http = http or HttpSettings()
        self.tracer = tracer
        self.responses = ResponseStore(self.http.response_store_bytes)
        self.cors = Cors(self.http.cors_allow_origin)
        self.request_ids = RequestIds()
        self.turns = trio.Lock()
        self.side_threads = SideThreads()
        self.serving = 0  # requests that have come and are not answered
        self.pace = LoopPace()
        self.config["PROVIDE_AUTOMATIC_OPTIONS"] = False  # OPTIONS is answered before routing
        self.url_map.merge_slashes = False
        self.shortcuts: dict[tuple[str, str], Route] = {}
        wanted = (*routes, *vertex.vertex_routes(self.http))  # the latter may replace one of ours
        for route in {(each.method, each.path): each for each in wanted}.values():
            self._register(route)
        self.register_error_handler(HTTPException, _http_error)
        self.register_error_handler(Exception, _answer_defect)

    def note_answered(self) -> None:
        """Note that a request is over."""
        self.serving -= 1

    def count_requests(self) -> int:
        """Return how many requests there are, abandoned ones and threads of large ones as well."""
        return max(self.serving, self.engine.load()[0]) + self.count_threads()

    def count_threads(self) -> int:
        """Return how many threads work on large requests."""
        return self.side_threads.running

    def _register(self, route: Route) -> None:
        async def view(**path: str) -> Response:
            return wrap_reply(await _current_request().answer(route, path))

        self.add_url_rule(
            route.path,
            endpoint=f"{route.method} {route.path}".replace(".", "_"),
            view_func=view,
            methods=[route.method],
            provide_automatic_options=False,
        )
        if route.method == "POST" and "<" not in route.path and self.http.shortcut:
            self.shortcuts[route.method, route.path] = route


def _current_request() -> HttpRequest:
    """Return the request that Quart is dispatching."""
    found: HttpRequest = cast("dict[str, Any]", request.scope)[_SCOPE_KEY]
    return found


async def _http_error(error: HTTPException) -> Response:
    """Answer what no route answers."""
    # Quart's request keeps the error, whose frames have the request: no garbage may be left.
    error.__traceback__ = error.__context__ = None
    allowed = [value for name, value in error.get_headers() if name.lower() == "allow"]
    id, status = _current_request().account.request_id, error.code or 500
    reply = reply_to_unrouted(status, request.method, request.path, id, ",".join(allowed), _PATHS)
    return wrap_reply(reply)


async def _answer_defect(error: Exception) -> Response:
    """Answer what failed between the routes and Quart, which leaves it to us to log that."""
    request_id = _current_request().account.request_id
    log_defect(request_id, error)
    problem = internal(request_id)
    return wrap_reply(Reply(problem.body(), problem.status))
