"""Lark terminals for strings that are written without quotes, from their schemas."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tgi_trio.router.text.tools.schemas import Schema
from tgi_trio.router.text.tools.terms import escape_regex

_DATE = r"[0-9]{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12][0-9]|3[01])"
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?"
    r"(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}",
    "ipv4": rf"(?:{_BYTE}\.){{3}}{_BYTE}",
    "email": r"[A-Za-z0-9_+-]+(?:\.[A-Za-z0-9_+-]+)*@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:[!-~]+",
}


def write_terminal(schema: Schema, without: str) -> str:
    """Return a Lark terminal for strings that fit a plain schema and do not contain `without`."""
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    length = f".{{{least},{most}}}" if least or most != "" else ".*"
    parts = [f"/(?s:{length})/"]
    patterns = schema.get("pattern", ())
    for pattern in (patterns,) if isinstance(patterns, str) else patterns:
        parts.append(f"/{_whole('|'.join(map(_unanchored, _split(pattern))))}/")
    if (named := FORMATS.get(str(schema.get("format")))) is not None:
        parts.append(f"/{_whole(named)}/")
    parts.append(f"~/(?s:.*){escape_regex(without)}(?s:.*)/")
    return " & ".join(parts)


def _whole(pattern: str) -> str:
    """Return a regular expression as a group, with slashes escaped."""
    return re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", f"(?:{pattern})", flags=re.DOTALL)


def _split(pattern: str) -> Iterator[str]:
    """Yield the alternatives of a regular expression."""
    depth, start, in_class = 0, 0, False
    for found in re.finditer(r"\\.|.", pattern, re.DOTALL):
        character = found[0]
        if in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        elif character in "()":
            depth += 1 if character == "(" else -1
        elif character == "|" and depth == 0:
            yield pattern[start : found.start()]
            start = found.end()
    yield pattern[start:]


def _unanchored(pattern: str) -> str:
    """Return an alternative that is searched for as an expression that matches the whole text."""
    begins, ends = pattern.startswith("^"), bool(re.search(r"(?<!\\)(?:\\\\)*\$\Z", pattern))
    inner = pattern[begins : len(pattern) - ends]
    return f"{'' if begins else '(?s:.*)'}(?:{inner}){'' if ends else '(?s:.*)'}"
