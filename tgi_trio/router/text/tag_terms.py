"""Parts of the grammars of structural tags: what ends a format, and terms of rules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from tgi_trio.router.text.tools.terms import escape_regex

# What follows a format: one of these texts, which it must end with; nothing that is known; or the
# end of the answer.
Ends = tuple[str, ...]
UNKNOWN: Final[Ends] = ()
LAST: Final[Ends] = ("",)

ANY: Final = "(?s:.*)"
_OPEN: Final = frozenset({"any_text", "triggered_tags", "dispatch"})


def is_open(given: Any) -> bool:
    """Return whether a format is free text, which ends only where something known follows."""
    return isinstance(given, dict) and str(given.get("type")) in _OPEN


def find_opening(given: Any) -> Ends:
    """Return the text with which a format begins; nothing where that is not one text."""
    if not isinstance(given, dict):
        return UNKNOWN
    text = given.get({"const_string": "value", "tag": "begin"}.get(str(given.get("type")), ""))
    return (text,) if isinstance(text, str) and text else UNKNOWN


def write_either(terms: Sequence[str]) -> str:
    """Return a term for one of some terms, of which there is at least one."""
    return terms[0] if len(terms) == 1 else f"({' | '.join(terms)})"


def write_without(texts: Iterable[str]) -> str:
    """Return an intersection for a terminal that contains none of these texts."""
    found = "|".join(escape_regex(each) for each in texts if each)
    return f" & ~/{ANY}(?:{found}){ANY}/" if found else ""
