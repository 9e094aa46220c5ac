"""How soon a request must be served: its deadline and its priority."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from tgi_trio.errors import ValidationError
from tgi_trio.router.http.call import Call
from tgi_trio.router.request import Request
from tgi_trio.router.validation import GenerationParameters

HEADER = b"x-request-timeout"


class Urgent(Protocol):
    """The part of a body that says how urgent it is."""

    timeout: float | None  # seconds from the request's arrival
    priority: int | None  # lower is sooner


async def validate_request(
    call: Call,
    prompt: str | Sequence[int],
    asked: GenerationParameters,
    urgent: Urgent,
    *,
    add_special_tokens: bool = True,
) -> Request:
    """Return the request for one prompt of a call; raises ValidationError."""
    return await call.engine.validator.validate(
        prompt,
        asked,
        add_special_tokens=add_special_tokens,
        priority=urgent.priority or 0,
        deadline=deadline(call, urgent.timeout),
        name=call.request_id,
    )


def deadline(call: Call, timeout: float | None) -> float | None:
    """Return the moment (trio clock) at which a call must have ended, by body and header.

    The sooner of both counts. Raises ValidationError.
    """
    given: list[tuple[str, float]] = []
    if timeout is not None:
        given.append(("timeout", timeout))
    if (text := call.headers.get(HEADER)) is not None:
        given.append((HEADER.decode(), _seconds(text)))
    for name, seconds in given:
        if not 0 < seconds < math.inf:  # NaN is neither
            raise ValidationError(f"`{name}` must be a number of seconds > 0. Given: {seconds:g}")
    return min((call.received + seconds for _, seconds in given), default=None)


def _seconds(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
