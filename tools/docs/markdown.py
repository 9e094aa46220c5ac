"""Tables and code in Markdown, and the sections of a document that are generated."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from tools.docs import contents

Sections = Mapping[str, Callable[[], str]]  # by name: what returns the text, line end included

_SECTION: Final = re.compile(
    r"(?P<open><!-- generated: (?P<name>[^\n]+) -->\n)(?P<old>.*?)(?P<close><!-- end -->)",
    re.DOTALL,
)


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    names = list(header)
    lines = [f"| {' | '.join(cells)} |" for cells in (names, *rows)]
    lines.insert(1, "|" + "---|" * len(names))
    return "\n".join(lines) + "\n"


def code(lines: Iterable[str], language: str = "text") -> str:
    """Return lines as a block of code."""
    return "\n".join([f"```{language}", *lines, "```"]) + "\n"


def show_code(text: str) -> str:
    """Return literal text for a cell of a table."""
    shown = text.replace("\n", "⏎").replace("|", "\\|")
    fence = "``" if "`" in shown else "`"
    space = " " if fence == "``" else ""
    return f"{fence}{space}{shown}{space}{fence}"


def section_names(text: str) -> list[str]:
    """Return the names of a document's marked sections, in order."""
    return [match["name"] for match in _SECTION.finditer(text)]


def refresh_sections(text: str, sections: Sections) -> str:
    """Return a document with every marked section written anew, but for its contents.

    Raises ValueError for a name that `sections` does not have.
    """

    def section(match: re.Match[str]) -> str:
        name = match["name"]
        if name == contents.NAME:  # of headings, which sections may have
            return match[0]
        if name not in sections:
            raise ValueError(f"no section is called {name!r}: there are {', '.join(sections)}")
        return f"{match['open']}{sections[name]()}{match['close']}"

    return _SECTION.sub(section, text)
