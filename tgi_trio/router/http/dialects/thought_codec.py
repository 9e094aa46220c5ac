"""Thoughts that a client keeps for us unread, and sends back with its next request."""

from __future__ import annotations

import base64
from contextlib import suppress
from typing import Final

_PREFIX: Final = "tgi-trio:"


def encode_thought(thought: str) -> str:
    """Return a thought as a text for the client to keep: encoded, not encrypted."""
    return _PREFIX + base64.b64encode(thought.encode()).decode()


def decode_thought(text: str | None) -> str:
    """Return the thought that `encode_thought` encoded; "" if something else made `text`."""
    if text is None or not text.startswith(_PREFIX):
        return ""
    with suppress(ValueError):  # no base64, letters beyond ASCII, no UTF-8
        return base64.b64decode(text.removeprefix(_PREFIX), validate=True).decode()
    return ""
