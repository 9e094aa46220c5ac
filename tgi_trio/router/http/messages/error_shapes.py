"""How each API reports errors: status, body, and the headers of all its replies."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, Final

import orjson

from tgi_trio.router.http.messages.blame import describe_length, find_code, find_param
from tgi_trio.router.http.messages.problems import Problem
from tgi_trio.router.http.wire.headers import Header


class ErrorShape:
    """TGI's own: a missing key is reported by the status only, a bad body as plain text."""

    bare = True

    def status(self, problem: Problem) -> int:
        """Return the status for a problem."""
        return problem.status

    def body(self, problem: Problem, request_id: str) -> bytes:
        """Return the body for a problem."""
        return problem.body()

    def headers(self, request_id: str) -> list[Header]:
        """Return headers for every reply of the API, error or not."""
        return []


class OpenAIShape(ErrorShape):
    """OpenAI's errors, with TGI's statuses.

    A prompt that is too long is a 400, as at OpenAI: many agents shorten their history at no other.
    """

    bare = False

    def __init__(
        self, fields: Container[str] = (), renamed: Mapping[str, str] | None = None
    ) -> None:
        """`fields`: of the body; `renamed`: what fields of TGI's are called there."""
        self._fields, self._renamed = fields, renamed or {}

    def status(self, problem: Problem) -> int:
        return problem.status if problem.too_long is None else 400

    def body(self, problem: Problem, request_id: str) -> bytes:
        """Return OpenAI's error object, with `error_type` beside it for TGI's clients."""
        error = {
            "message": describe_length(problem),
            "type": problem.error_type,
            **self.blame(problem),
            "http_status_code": self.status(problem),
        }
        return orjson.dumps({"error": error, "error_type": problem.error_type})

    def blame(self, problem: Problem) -> dict[str, str | None]:
        """Return the fields `param` and `code` for a problem."""
        param = find_param(problem, self._fields, self._renamed)
        return {"param": param, "code": find_code(problem, param)}


def openai_event(problem: Problem, id: str) -> bytes:
    """Return the error event of an OpenAI stream, with the `id` of its chunks."""
    error = {
        "message": problem.error,
        "http_status_code": problem.status,
        "type": problem.error_type,
        "param": None,
        "code": find_code(problem, None),
    }
    return b"data: %b\n\n" % orjson.dumps({"error": error, "id": id})


class ResponsesShape(OpenAIShape):
    """Errors of OpenAI's Responses API. Any error in a request is a 400."""

    def status(self, problem: Problem) -> int:
        return _RESPONSES_STATUSES.get(problem.status, problem.status)

    def body(self, problem: Problem, request_id: str) -> bytes:
        return orjson.dumps({"error": self.describe(problem)})

    def describe(self, problem: Problem) -> dict[str, str | None]:
        """Return OpenAI's error object for a problem."""
        status = self.status(problem)
        kind = "invalid_request_error" if status < 500 and status != 429 else "server_error"
        return {
            "message": describe_length(problem),
            "type": "rate_limit_error" if status == 429 else kind,
            **self.blame(problem),
        }


_RESPONSES_STATUSES: Final[Mapping[int, int]] = {415: 400, 422: 400, 424: 500}


class AnthropicShape(ErrorShape):
    """Anthropic's errors. Any error in a request is a 400, so that clients do not retry it."""

    bare = False

    def status(self, problem: Problem) -> int:
        return _ANTHROPIC_STATUSES.get(problem.status, problem.status)

    def body(self, problem: Problem, request_id: str) -> bytes:
        return orjson.dumps(
            {**anthropic_error(problem, self.status(problem)), "request_id": request_id}
        )

    def headers(self, request_id: str) -> list[Header]:
        return [(b"request-id", request_id.encode("latin-1"))]


_ANTHROPIC_STATUSES: Final[Mapping[int, int]] = {415: 400, 422: 400, 424: 500, 503: 529}
_ANTHROPIC_TYPES: Final[Mapping[int, str]] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def anthropic_error(problem: Problem, status: int) -> dict[str, Any]:
    """Return Anthropic's error object for a status of its API, for bodies and events."""
    text = problem.error
    if problem.too_long is not None:
        # Agents look for these words, and then shorten their history.
        length = problem.too_long
        text = f"prompt is too long: {length.tokens} tokens > {length.most} maximum"
    return {
        "type": "error",
        "error": {"type": _ANTHROPIC_TYPES.get(status, "api_error"), "message": text},
    }


NATIVE: Final = ErrorShape()
OPENAI: Final = OpenAIShape()
RESPONSES: Final = ResponsesShape()
ANTHROPIC: Final = AnthropicShape()
