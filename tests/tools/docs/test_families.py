"""A type in the table of families has links to what docs/families.md says of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tgi_trio.model.families.registry import FAMILIES
from tools.docs import models
from tools.docs.families import link_sections

PAGE = "# All\n\n## Some\n\n### A and B\n\nTypes: `a`,\n`b`\n\n`c` is none.\n\n"


def test_a_type_is_linked_to_each_of_its_sections() -> None:
    links = link_sections(PAGE + "### B 2\n\nTypes: `b`\n\nText.\n", ("a", "b", "c"))
    assert links == {
        "a": "[A and B](families.md#a-and-b)",
        "b": "[A and B](families.md#a-and-b), [B 2](families.md#b-2)",
    }


@pytest.mark.parametrize(
    ("section", "reason"),
    [("Text.\n", "'C' has no types"), ("Types: `a`, `d`\n\n", "'C' has unknown types: d")],
)
def test_sections_name_types_that_there_are(section: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        link_sections(f"{PAGE}### C\n\n{section}", ("a", "b"))


def test_the_table_has_the_links() -> None:
    page = (Path(__file__).parents[3] / "docs/families.md").read_text()
    rows = {row.split("`")[1]: row for row in models.render().splitlines() if row[:3] == "| `"}
    links = link_sections(page, FAMILIES)
    assert len(links) > 50
    assert all(rows[name].endswith(f"| {link} |") for name, link in links.items())
