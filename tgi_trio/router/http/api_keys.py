"""API keys: whether a request shows one, and which."""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from hashlib import sha256


def is_authorized(headers: Mapping[bytes, bytes], keys: Sequence[str]) -> bool:
    """Return whether a request carries one of the keys, compared as TGI does: without case.

    It comes as `Authorization: Bearer <key>` or as `x-api-key: <key>`.
    """
    return not keys or bool(_find_keys(headers, keys))


def name_caller(headers: Mapping[bytes, bytes], keys: Sequence[str]) -> bytes:
    """Return what tells callers with different keys apart; the same for all where none is asked."""
    return sha256(b"\n".join(_find_keys(headers, keys))).digest()


def _find_keys(headers: Mapping[bytes, bytes], keys: Sequence[str]) -> list[bytes]:
    """Return the keys that a request carries; takes the same time whichever they are."""
    given = [headers.get(b"authorization", b""), b"Bearer " + headers.get(b"x-api-key", b"")]
    expected = [f"Bearer {key}".encode().lower() for key in keys]  # bytes: ASCII letters alone
    shown = [[hmac.compare_digest(one.lower(), each) for one in given] for each in expected]
    return [each for each, found in zip(expected, shown, strict=True) if any(found)]
