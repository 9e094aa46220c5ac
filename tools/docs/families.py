"""Which sections of docs/families.md are of a model type."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Final

from tools.docs.contents import headings

NAME: Final = "families.md"
_TYPES: Final = re.compile(r"^Types: (?P<list>.+?)\n\n", re.DOTALL | re.MULTILINE)
_NAME: Final = re.compile(r"`([^`]+)`")


def link_sections(page: str, known: Collection[str]) -> Mapping[str, str]:
    """Return links from another document to the sections of each type, by type.

    A section of the third level begins with its types. Raises ValueError for a section without
    them, and for a type that is not among the known ones.
    """
    links: dict[str, list[str]] = {}
    for title, anchor, types in _sections(page):
        if not types or (strange := [name for name in types if name not in known]):
            reason = f"unknown types: {', '.join(strange)}" if types else "no types"
            raise ValueError(f"docs/{NAME}, section {title!r} has {reason}")
        for name in types:
            links.setdefault(name, []).append(f"[{title}]({NAME}#{anchor})")
    return {name: ", ".join(found) for name, found in links.items()}


def _sections(page: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yield title, anchor and types of each section of the third level."""
    titles = [(title, anchor) for level, title, anchor in headings(page) if level == 3]
    bodies = re.split(r"^### .+\n\n", page, flags=re.MULTILINE)[1:]
    for (title, anchor), body in zip(titles, bodies, strict=True):
        stated = _TYPES.match(body)
        yield title, anchor, _NAME.findall(stated["list"]) if stated else []
