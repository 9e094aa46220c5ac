"""How each API reports errors: status, body, and the headers of all its replies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

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
    """OpenAI's errors, with TGI's statuses."""

    bare = False

    def body(self, problem: Problem, request_id: str) -> bytes:
        return problem.openai_body()


class ResponsesShape(ErrorShape):
    """Errors of OpenAI's Responses API. Any error in a request is a 400."""

    bare = False

    def status(self, problem: Problem) -> int:
        return _RESPONSES_STATUSES.get(problem.status, problem.status)

    def body(self, problem: Problem, request_id: str) -> bytes:
        status = self.status(problem)
        kind = "invalid_request_error" if status < 500 and status != 429 else "server_error"
        error = {
            "message": problem.error,
            "type": "rate_limit_error" if status == 429 else kind,
            "param": None,
            "code": responses_code(problem),
        }
        return orjson.dumps({"error": error})


_RESPONSES_STATUSES: Final[Mapping[int, int]] = {415: 400, 422: 400, 424: 500}
_RESPONSES_CODES: Final[Mapping[int, str]] = {
    401: "invalid_api_key",
    404: "model_not_found",
    429: "rate_limit_exceeded",
}


def responses_code(problem: Problem) -> str | None:
    """Return the `code` by which programs distinguish problems; None if there is none."""
    if problem.too_long is not None:
        return "context_length_exceeded"
    if problem.error_type == "previous_response_not_found":
        return problem.error_type
    if problem.status >= 500 or problem.status == 424:
        return "server_error"
    return _RESPONSES_CODES.get(problem.status)


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
        tokens, most = problem.too_long
        text = f"prompt is too long: {tokens} tokens > {most} maximum"
    return {
        "type": "error",
        "error": {"type": _ANTHROPIC_TYPES.get(status, "api_error"), "message": text},
    }


NATIVE: Final = ErrorShape()
OPENAI: Final = OpenAIShape()
RESPONSES: Final = ResponsesShape()
ANTHROPIC: Final = AnthropicShape()
