"""Maps exceptions to HTTP errors: a status, TGI's `error_type`, and a text for the reader."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import orjson

from tgi_trio import errors
from tgi_trio.router.http.wire.headers import Header

ELSEWHERE: Final = b"x-tgi-elsewhere"  # of an answer to a front: another replica may have it


@dataclass(frozen=True, slots=True)
class Problem:
    """One failure as clients see it, in a body or in an event."""

    status: int
    error: str
    error_type: str
    retry_after: float | None = None  # seconds
    too_long: errors.ExcessiveLength | None = None  # of a prompt
    param: str | None = None  # path of the field that it is about, where the text does not say it
    code: str | None = None  # OpenAI's word for it, where `blame.find_code` does not find one
    elsewhere: bool = False  # a front may ask the next replica

    def body(self) -> bytes:
        """Return TGI's ErrorResponse."""
        return orjson.dumps({"error": self.error, "error_type": self.error_type})

    def native_event(self) -> bytes:
        """Return the error event of `/generate_stream`."""
        return b"data: %b\n\n" % self.body()

    def headers(self) -> list[Header]:
        """Return `retry-after` if waiting helps, and for a front whether asking elsewhere does."""
        found: list[Header] = [(ELSEWHERE, b"1")] if self.elsewhere else []
        if self.retry_after is not None:
            found.append((b"retry-after", b"%d" % max(1, math.ceil(self.retry_after))))
        return found


_MOST, _BEGIN, _END = 4000, 2000, 1000  # characters of an error, and what is told of a longer one
_SHOWN: Final = 60  # most characters of a coding's name in its error


class Refused(errors.TgiTrioError):
    """A request that a route refuses before validation."""

    def __init__(
        self,
        status: int,
        message: str,
        error_type: str,
        *,
        code: str | None = None,
        elsewhere: bool = False,
    ) -> None:
        """`code`: OpenAI's word for it, if it has one of its own; `elsewhere`: see `Problem`."""
        super().__init__(message)
        self.status = status
        self.error_type = error_type
        self.code = code
        self.elsewhere = elsewhere


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


def tell(error: BaseException) -> str:
    """Return an error's text. One that repeats a value of the client's is told without its middle,
    which nobody reads and many keep in a log.
    """
    text = str(error)
    return text if len(text) <= _MOST else f"{text[:_BEGIN]} [...] {text[-_END:]}"


def to_problem(error: BaseException) -> Problem | None:
    """Return the client's error for an exception; None if it is not one of ours."""
    text = tell(error)
    match error:
        case Refused():
            return Problem(
                error.status,
                text,
                error.error_type,
                param=error.param,
                code=error.code,
                elsewhere=error.elsewhere,
            )
        case errors.ValidationError():
            text = f"Input validation error: {text}"
            too_long = error.length if isinstance(error, errors.PromptTooLong) else None
            return Problem(422, text, "validation", too_long=too_long, param=error.param)
        case errors.TemplateError():
            text = f"Template error: {text}"
            return Problem(422, text, "template_error", param=error.param or "messages")
        case errors.ToolError():
            text = f"Tool error: {text}"
            return Problem(422, text, "tool_error", param=error.param)
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
