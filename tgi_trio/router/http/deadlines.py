"""How long a client waits for its answer: `timeout` of a body, and the header x-request-timeout."""

from __future__ import annotations

import math
from typing import Final

from tgi_trio.errors import GenerationError, ValidationError
from tgi_trio.router.http.call import Call

HEADER = b"x-request-timeout"
_SHOWN: Final = 60  # most bytes of the header in its error


def find_deadline(call: Call, timeout: float | None) -> float | None:
    """Return a call's deadline (trio clock): the earlier one of body and header.

    Time that the call has spent in a front counts. Raises ValidationError, and GenerationError if
    the deadline passed before the call arrived.
    """
    given: list[tuple[str, float, str]] = []  # name, seconds, as it was written
    if timeout is not None:
        given.append(("timeout", timeout, f"{timeout:g}"))
    if (text := call.headers.get(HEADER)) is not None:
        given.append((HEADER.decode(), _seconds(text), text[:_SHOWN].decode("latin-1") or "``"))
    for name, seconds, said in given:
        if not 0 < seconds < math.inf:  # NaN is neither
            raise ValidationError(f"`{name}` must be a number of seconds > 0. Given: {said}")
    waited = 0.0 if call.front is None else call.front.waited
    left = min((seconds - waited for _, seconds, _ in given), default=math.inf)
    if left <= 0:
        raise GenerationError("the request's deadline has passed")
    return None if math.isinf(left) else call.received + left


def _seconds(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
