"""The contents of a long document: its headings, as links to them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Final

NAME: Final = "contents"  # of the marked section
_SECTION: Final = re.compile(
    rf"(?P<open><!-- generated: {NAME} -->\n).*?(?P<close><!-- end -->)", re.DOTALL
)
_FENCE: Final = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_HEADING: Final = re.compile(r"^(#{1,6}) (.+)$", re.MULTILINE)


def headings(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the level, title and anchor of each heading; the anchor is the one GitHub gives it."""
    seen: Counter[str] = Counter()
    for marks, title in _HEADING.findall(_FENCE.sub("", text)):
        anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        again, seen[anchor] = seen[anchor], seen[anchor] + 1
        yield len(marks), title, f"{anchor}-{again}" if again else anchor


def refresh_contents(text: str) -> str:
    """Return a document with its contents, if they are marked, written anew.

    A heading of the second level has a line, on which those of the third level follow it.
    """
    return _SECTION.sub(lambda match: match["open"] + _contents(text) + match["close"], text)


def _contents(text: str) -> str:
    lines: list[list[str]] = []
    for level, title, anchor in headings(text):
        link = f"[{title}](#{anchor})"
        if level == 2:
            lines.append([link])
        elif level == 3:
            lines[-1].append(link)
    rows = (f"- {head}{': ' if rest else ''}{', '.join(rest)}\n" for head, *rest in lines)
    return f"\n{''.join(rows)}\n"
