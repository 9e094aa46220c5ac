"""Which documents have generated parts, and where each part comes from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.docs import (
    budgets,
    calls,
    command_line,
    infill,
    ipc,
    kernels,
    metrics,
    models,
    modules,
    protocol,
    state_tables,
)
from tools.docs.contents import refresh_contents
from tools.docs.markdown import Sections, refresh_sections, section_names

ROOT: Final = Path(__file__).parents[2]

WHOLE: Final[Mapping[str, Callable[[], str]]] = {
    "docs/models.md": models.render,
    "docs/protocol.md": protocol.render,
}
SECTIONS: Final[Sections] = {
    **calls.SECTIONS,
    **command_line.SECTIONS,
    **infill.SECTIONS,
    **ipc.SECTIONS,
    **kernels.SECTIONS,
    **metrics.SECTIONS,
    **modules.SECTIONS,
    **state_tables.SECTIONS,
    "budgets": budgets.render,
}


@dataclass(frozen=True)
class Page:
    """A document as it is and as it should be."""

    name: str  # from the root of the repository
    old: str
    new: str


def pages() -> Iterator[Page]:
    """Yield every document with something generated in it.

    Raises ValueError for a marker that nobody knows, and for a section that is not used once.
    """
    used: Counter[str] = Counter()
    for path in sorted((ROOT / "docs").rglob("*.md")):
        name, old = str(path.relative_to(ROOT)), path.read_text()
        if name in WHOLE:
            yield Page(name, old, refresh_contents(WHOLE[name]()))
        elif names := section_names(old):
            used.update(names)
            yield Page(name, old, refresh_contents(refresh_sections(old, SECTIONS)))
    if wrong := [name for name in SECTIONS if used[name] != 1]:
        raise ValueError(f"documents must have these sections once: {', '.join(wrong)}")
