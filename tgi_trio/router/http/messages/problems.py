"""Maps exceptions to HTTP errors: a status, TGI's `error_type`, and a text for the reader."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import orjson

from tgi_trio import errors
from tgi_trio.router.http.wire.headers import Header


@dataclass(frozen=True, slots=True)
class Problem:
    """One failure as clients see it, in a body or in an event."""

    status: int
    error: str
    error_type: str
    retry_after: float | None = None  # seconds
    too_long: tuple[int, int] | None = None  # tokens of a prompt, and the most that it may have

    def body(self) -> bytes:
        """Return TGI's ErrorResponse."""
        return orjson.dumps({"error": self.error, "error_type": self.error_type})

    def openai_body(self) -> bytes:
        """Return OpenAI's error object, with `error_type` beside it for TGI's clients."""
        error = {
            "message": self.error,
            "type": self.error_type,
            "param": None,
            "code": None,
            "http_status_code": self.status,
        }
        return orjson.dumps({"error": error, "error_type": self.error_type})

    def native_event(self) -> bytes:
        """Return the error event of `/generate_stream`."""
        return b"data: %b\n\n" % self.body()

    def openai_event(self, id: str) -> bytes:
        """Return the error event of an OpenAI stream, with the `id` of its chunks."""
        error = {
            "message": self.error,
            "http_status_code": self.status,
            "type": self.error_type,
        }
        return b"data: %b\n\n" % orjson.dumps({"error": error, "id": id})

    def headers(self) -> list[Header]:
        """Return `retry-after` if waiting helps."""
        if self.retry_after is None:
            return []
        return [(b"retry-after", b"%d" % max(1, math.ceil(self.retry_after)))]


_SHOWN: Final = 60  # most characters of a coding's name in its error


class Refused(errors.TgiTrioError):
    """A request that a route refuses before validation."""

    def __init__(self, status: int, message: str, error_type: str) -> None:
        super().__init__(message)
        self.status = status
        self.error_type = error_type


class BodyRejected(errors.TgiTrioError):
    """A body that is not JSON of the right form; native routes answer it with plain text."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def too_large(limit: int) -> BodyRejected:
    """Return the error for a body above --payload-limit, in bytes; TGI's words come first."""
    return BodyRejected(
        413,
        "Failed to buffer the request body: length limit exceeded: "
        f"it is longer than {limit} bytes (--payload-limit)",
    )


def check_coding(coding: bytes) -> None:
    """Raise BodyRejected (415) for a body that is compressed; `coding`: its content-encoding."""
    coding = coding.strip()
    if coding.lower() not in (b"", b"identity"):
        shown = coding[:_SHOWN].decode("latin-1")
        raise BodyRejected(
            415, f"Expected a body as it is: `Content-Encoding: {shown}` is not supported"
        )


def too_slow() -> BodyRejected:
    """Return the error for a body that takes too long to arrive."""
    return BodyRejected(408, "The request body did not arrive in time")


def problem_of(error: BaseException) -> Problem | None:
    """Return the client's error for an exception; None if it is not one of ours."""
    text = str(error)
    match error:
        case Refused():
            return Problem(error.status, text, error.error_type)
        case errors.PromptTooLong():
            too_long = (error.tokens, error.most)
            return Problem(422, f"Input validation error: {text}", "validation", too_long=too_long)
        case errors.ValidationError():
            return Problem(422, f"Input validation error: {text}", "validation")
        case errors.TemplateError():
            return Problem(422, f"Template error: {text}", "template_error")
        case errors.ToolError():
            return Problem(422, f"Tool error: {text}", "tool_error")
        case errors.Overloaded():
            return Problem(429, text, "overloaded", error.retry_after)
        case errors.Unavailable():
            return Problem(503, text, "unavailable", error.retry_after)
        case errors.GenerationError() | errors.PeerError():
            return Problem(424, f"Request failed during generation: {text}", "generation")
    return None


def internal(request_id: str) -> Problem:
    """Return the client's error for a defect of the server; the log has the details."""
    text = f"Internal error; the server's log says more under request id {request_id}"
    return Problem(500, text, "internal")
