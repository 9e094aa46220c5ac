"""Whose things are kept, and why something is not found."""

from __future__ import annotations

from tgi_trio.router.http.api_keys import name_caller
from tgi_trio.router.http.call import Call


def read_caller(call: Call) -> bytes:
    """Return what tells the callers of different keys apart."""
    return name_caller(call.headers, call.settings.api_keys)


def explain_missing(call: Call) -> str:
    """Return why something is not found that a caller names."""
    if not call.responses.most:
        return "nothing is stored here (--response-store-bytes 0)"
    return "it was not stored, or is no longer (--response-store-bytes)"
