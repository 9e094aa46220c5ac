"""The common part of all routes: API keys, request ids, CORS, and replies to errors."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import trio

from tgi_trio.router.http.api_keys import is_authorized
from tgi_trio.router.http.call import Call, Reply, Route
from tgi_trio.router.http.generation import explain
from tgi_trio.router.http.messages.error_shapes import ANTHROPIC, OPENAI, ErrorShape
from tgi_trio.router.http.messages.problems import BodyRejected, Problem, tell
from tgi_trio.router.http.messages.unserved_paths import explain_path
from tgi_trio.router.http.resume import read_front
from tgi_trio.router.http.wire.headers import Header

_LONGEST_PATH = 200  # characters of an unknown path that its answer repeats
_LONGEST_ID = 128  # characters of a client's request id that are taken over

UNAUTHORIZED = Reply(b"", status=401, content_type=b"")
_NO_KEY = Problem(
    401,
    "The API key is missing or wrong: send `Authorization: Bearer <key>` or `x-api-key: <key>`",
    "unauthorized",
)


async def answer_call(route: Route, call: Call) -> Reply:
    """Return the route's reply, or the reply for the error it raised. Raises only Cancelled."""
    dialect = ANTHROPIC if route.anthropic and call.from_anthropic else route.dialect
    if route.protected and not is_authorized(call.headers, call.settings.api_keys):
        return UNAUTHORIZED if dialect.bare else make_reply(_NO_KEY, dialect, call.request_id)
    try:
        call.front = read_front(call.headers, call.settings.front_secret)
        reply = await route.handler(call)
        reply.headers += dialect.headers(call.request_id)
        return reply
    except Exception as error:
        return reply_to_error(call, dialect, error)
    except BaseExceptionGroup as group:
        _, others = group.split(trio.Cancelled)
        if others is None:
            raise
        return reply_to_error(call, dialect, others)


def reply_to_error(call: Call, dialect: ErrorShape, error: BaseException) -> Reply:
    """Return the reply for an error; an unexpected one is logged as well."""
    if isinstance(error, BodyRejected):
        return to_rejection(error, dialect, call.request_id)
    return make_reply(explain(call, error), dialect, call.request_id)


def make_reply(problem: Problem, dialect: ErrorShape, request_id: str = "") -> Reply:
    """Return the reply for a problem, in the error shape of an API."""
    headers = [*problem.headers(), *dialect.headers(request_id)]
    return Reply(dialect.body(problem, request_id), dialect.status(problem), headers=headers)


def to_rejection(error: BodyRejected, dialect: ErrorShape, request_id: str) -> Reply:
    """Return the reply to a body that could not be read: plain text, or an API's error shape."""
    if not dialect.bare:
        problem = Problem(error.status, tell(error), "invalid_body", param=error.param)
        return make_reply(problem, dialect, request_id)
    text = tell(error).encode("utf-8", "replace")
    return Reply(text, error.status, b"text/plain; charset=utf-8")


def reply_to_unrouted(
    status: int,
    method: str,
    path: str,
    request_id: str,
    allowed: str = "",
    served: Collection[str] = (),
) -> Reply:
    """Return the reply to a request that no route answers; `allowed`: methods of the path.

    `served`: the paths of routes.

    It is in OpenAI's shape, or in Anthropic's below /v1/messages, where their API has more routes.
    """
    dialect = ANTHROPIC if path.startswith("/v1/messages") else OPENAI
    shown = path if len(path) <= _LONGEST_PATH else f"{path[:_LONGEST_PATH]}..."
    match status:
        case 404:
            why = explain_path(path, served)
            why = f": {why}" if why else ""
            text = f"Nothing is served at `{shown}`{why}; GET /docs lists what is"
            problem = Problem(status, text, "not_found")
        case 405:
            methods = ",".join(sorted(allowed.replace(" ", "").split(",")))  # they come as a set
            text = f"`{shown}` does not answer {method}; it answers {methods.replace(',', ', ')}"
            allow = (b"allow", methods.encode("latin-1"))
            reply = make_reply(Problem(status, text, "method_not_allowed"), dialect, request_id)
            return replace(reply, headers=[*reply.headers, allow])
        case _:
            problem = Problem(status, f"The request to `{shown}` cannot be answered", "http")
    return make_reply(problem, dialect, request_id)


class RequestIds:
    """Gives requests ids: the client's `x-request-id`, or a number unique in this process."""

    def __init__(self) -> None:
        self._prefix = os.urandom(6).hex()
        self._numbers: Iterator[int] = itertools.count(1)

    def name(self, headers: Mapping[bytes, bytes]) -> str:
        """Return the id of a request."""
        given = headers.get(b"x-request-id")
        if given:
            text = given[:_LONGEST_ID].decode("latin-1")
            if text.isascii() and text.isprintable():
                return text
        return f"{self._prefix}-{next(self._numbers):x}"


class Cors:
    """CORS headers, as TGI's (tower-http)."""

    _USUAL = (  # what is granted to whoever does not say what it wants
        b"content-type,authorization,x-api-key,x-request-id,x-request-timeout,"
        b"anthropic-version,anthropic-beta,anthropic-dangerous-direct-browser-access"
    )
    _VARY = (b"vary", b"origin, access-control-request-method, access-control-request-headers")

    def __init__(self, origins: Sequence[str]) -> None:
        """`origins`: those that may call; none means all."""
        self._any = not origins or "*" in origins
        self._origins = frozenset(origin.encode("latin-1") for origin in origins)

    def headers(self, request: Mapping[bytes, bytes]) -> list[Header]:
        """Return the headers that every reply to `request` carries."""
        origin = request.get(b"origin")
        if self._any:
            return [self._VARY, (b"access-control-allow-origin", b"*")]
        if origin is not None and origin in self._origins:
            return [self._VARY, (b"access-control-allow-origin", origin)]
        return [self._VARY]

    def preflight(self, request: Mapping[bytes, bytes]) -> Reply:
        """Return the answer to OPTIONS, which grants the headers that a browser asks for.

        They say nothing of a user, as no cookie counts here. TGI grants content-type alone, so that
        no page can send the key it asks for.
        """
        return Reply(
            b"",
            content_type=b"",
            headers=[
                (b"access-control-allow-methods", b"GET,POST,DELETE"),
                (
                    b"access-control-allow-headers",
                    request.get(b"access-control-request-headers") or self._USUAL,
                ),
            ],
        )
