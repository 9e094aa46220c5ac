"""What the code knows is in the documents, and `python -m tools.docs` says where it is not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tgi_trio.router.shards.group_states import ShardState
from tgi_trio.router.telemetry.metric_table import METRICS
from tools.docs import __main__ as program
from tools.docs import metrics, pages
from tools.docs.contents import refresh_contents
from tools.docs.markdown import refresh_sections

ROOT = Path(__file__).parents[3]


def test_the_documents_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.docs"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_marker_is_closed() -> None:
    for path in (ROOT / "docs").rglob("*.md"):
        text = path.read_text()
        assert text.count("<!-- generated: ") == text.count("<!-- end -->"), path.name


def test_a_long_document_begins_with_its_contents() -> None:
    for path in (ROOT / "docs").rglob("*.md"):
        lines = path.read_text().splitlines()
        if len(lines) > 450 and path.name != "modules.md":  # which has one list
            assert "<!-- generated: contents -->" in lines[:16], path.name


def test_contents_are_links_to_headings() -> None:
    marked = "<!-- generated: contents -->\n<!-- end -->\n"
    body = "## A `b`: c\n### D\n### E, f\n## D\n```text\n## none\n```\n"
    text = refresh_contents(marked + body)
    listed = "- [A `b`: c](#a-b-c): [D](#d), [E, f](#e-f)\n- [D](#d-1)\n"
    assert text == f"<!-- generated: contents -->\n\n{listed}\n<!-- end -->\n{body}"
    assert refresh_contents(text) == text == refresh_sections(text, pages.SECTIONS)


def test_only_what_is_between_the_markers_changes() -> None:
    before, after = "# By hand\n\n", "\n\nalso by hand <!-- end -->\n"
    marked = "<!-- generated: shard-lifecycle -->\nold\n<!-- end -->"
    text = refresh_sections(before + marked + after, pages.SECTIONS)
    assert text.startswith(before) and text.endswith(after)
    assert "old" not in text
    assert all(state.name in text for state in ShardState)
    assert refresh_sections(text, pages.SECTIONS) == text


def test_an_unknown_section_is_an_error() -> None:
    with pytest.raises(ValueError, match="shard-lifecycle"):
        refresh_sections("<!-- generated: nothing -->\n<!-- end -->", pages.SECTIONS)


def test_the_metrics_have_a_row_each() -> None:
    rows = metrics.render(METRICS).splitlines()[2:]
    assert len(rows) == len(METRICS)
    assert all(row.count("|") == 6 for row in rows)


# ---- the command, on a repository of its own ---------------------------------------------------


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one document, which has one section."""
    sections: Mapping[str, object] = {"facts": lambda: "new\n"}
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/a.md").write_text("by hand\n<!-- generated: facts -->\nold\n<!-- end -->\n")
    (tmp_path / "docs/b.md").write_text("by hand alone\n")
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(program, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "WHOLE", {})
    monkeypatch.setattr(pages, "SECTIONS", sections)
    return tmp_path


def test_a_stale_document_fails_the_check_with_the_difference(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (repository / "docs/a.md").read_text()
    assert program.main([]) == 1
    shown = capsys.readouterr()
    assert "--- docs/a.md" in shown.out and "-old\n+new\n" in shown.out
    assert "--write" in shown.err
    assert (repository / "docs/a.md").read_text() == before


def test_writing_makes_the_check_pass(repository: Path) -> None:
    assert program.main(["--write"]) == 0
    assert (repository / "docs/a.md").read_text() == (
        "by hand\n<!-- generated: facts -->\nnew\n<!-- end -->\n"
    )
    assert program.main([]) == 0


@pytest.mark.parametrize(
    "text", ["by hand alone\n", "<!-- generated: facts -->\n<!-- end -->\n" * 2]
)
def test_a_section_that_is_not_used_once_is_an_error(repository: Path, text: str) -> None:
    (repository / "docs/a.md").write_text(text)
    with pytest.raises(ValueError, match="facts"):
        program.main([])
