"""Mends halves of surrogate pairs in the bodies of requests.

JavaScript's texts are UTF-16. One that was cut in the middle of an emoji ends in half a pair, which
`JSON.stringify` writes as an escape that is no JSON. Agents send all of their history with every
request, so that one such text in it would end the session for good.
"""

from __future__ import annotations

import json
import re
from typing import Final

_HALF: Final = re.compile(rb"\\u[dD][89a-fA-F]")  # the escape of one, or what looks like it


def mend_surrogates(body: bytes | bytearray | memoryview) -> bytes | None:
    """Return JSON with U+FFFD in place of each half of a pair; None where that is not its fault.

    All of it runs in C: looking for halves among the escapes of a body of megabytes takes longer
    than to read it, and to write it anew.
    """
    if _HALF.search(body) is None:
        return None
    try:
        text = json.dumps(json.loads(bytes(body).decode()), ensure_ascii=False)
    except (ValueError, RecursionError):  # no JSON, no UTF-8
        return None
    units = text.encode("utf-16-le", "surrogatepass")
    mended = units.decode("utf-16-le", "replace")
    return None if mended == text else mended.encode()
