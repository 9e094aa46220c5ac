"""The documents say what the code says."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import tgi_trio
from tgi_trio.cli.flags import list_flags
from tgi_trio.cli.foreign import IDLE, REFUSED
from tgi_trio.cli.parser import parse
from tools.docs.contents import headings

PACKAGE = Path(tgi_trio.__file__).parent
ROOT = PACKAGE.parent
HOLE = "\0"  # stands for a part of a message that is filled in when it is shown


def test_every_flag_has_its_row() -> None:
    text = (ROOT / "docs/operations/flags.md").read_text()
    for name in [flag.name for flag in list_flags()] + [
        *(row.name for row in REFUSED),
        *(row.name for row in IDLE),
    ]:
        variable = name.upper().replace("-", "_")
        rows = rf"^\| (`--{name}[ `]| \| `{variable}` \|)"
        assert re.search(rows, text, re.MULTILINE), name


PAGES = ["README.md", "CONTRIBUTING.md", "examples/README.md"]
PAGES += [str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("document", PAGES)
def test_links_between_documents_lead_somewhere(document: str) -> None:
    path = ROOT / document
    for target, anchor in re.findall(r"\]\((?!https?://)([^)#]*)(?:#([^)]+))?\)", path.read_text()):
        there = path.parent / target if target else path
        assert there.exists(), f"{document}: {target}"
        if anchor:
            known = {each for _, _, each in headings(there.read_text())}
            assert anchor in known, f"{document}: {target}#{anchor}"


FOLDERS = sorted({path.parent for path in (ROOT / "docs").rglob("*.md")})


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_document_is_in_the_list_of_its_folder(folder: Path) -> None:
    """README.md links all pages beside it, and the README.md of every folder below."""
    links = re.findall(r"\]\(([^)#]+\.md)\)", (folder / "README.md").read_text())
    below = {path.name for path in folder.glob("*.md")} - {"README.md"}
    below |= {f"{path.parent.name}/README.md" for path in folder.glob("*/README.md")}
    assert below <= set(links)


@pytest.mark.parametrize("document", PAGES)
def test_commands_of_documents_can_be_typed(document: str) -> None:
    """Flags and values that they show are those that there are."""
    text = (ROOT / document).read_text().replace("\\\n", "")
    for block in re.findall(r"^```\w*\n(.+?)^```", text, re.DOTALL | re.MULTILINE):
        for line in re.findall(r"(?:-m tgi_trio|^(?:\$ )?tgi-trio)(?= )(.*)", block, re.MULTILINE):
            parse(shlex.split(line, comments=True), {})


# ---- docs/errors.md --------------------------------------------------------------------------


def test_no_row_of_the_errors_leans_on_the_row_above() -> None:
    """Readers come to a row by searching for their message, and rows come in between."""
    text = (ROOT / "docs/errors.md").read_text()
    leaning = re.findall(
        r"^.*\| (?:as above|as below|likewise|the same)(?: \||[,:;]).*$", text, re.M
    )
    assert not leaning


def documented() -> list[str]:
    """Return the messages of docs/errors.md, with a hole for every <part> that varies."""
    page = (ROOT / "docs/errors.md").read_text()
    rows = re.findall(r"^\| ``(.+?)``(?: \([^()]+\))? \|", page, re.MULTILINE)
    return [re.sub(r"<[^<>]+>", HOLE, row.strip()) for row in rows]


def texts(node: ast.AST) -> Iterator[str]:
    """Yield every text in a piece of code, with a hole for every value that is put in."""
    for each in ast.walk(node):
        if isinstance(each, ast.Constant) and isinstance(each.value, str | bytes):
            value = each.value
            yield value if isinstance(value, str) else value.decode("latin-1")
        elif isinstance(each, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else HOLE for part in each.values
            )


def modules(*beginnings: str) -> Iterator[tuple[str, ast.Module]]:
    """Yield every module whose path begins in one of these ways."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name.startswith(beginnings):
            yield name, ast.parse(path.read_bytes())


def squeezed(text: str) -> str:
    """Neighbouring holes count as one; %s and the like are holes too."""
    return re.sub(rf"{HOLE}+", HOLE, re.sub(r"%[sdr]", HOLE, text))


def test_every_documented_message_is_in_the_source() -> None:
    source = squeezed("\n\1\n".join(text for _, tree in modules("") for text in texts(tree)))
    assert len(documented()) > 50
    rows = [squeezed(row) for row in documented()]
    assert not [row for row in rows if row not in source]


# Errors that people read, and which argument is the message.
SHOWN = {
    "BodyRejected": 1,
    "ConfigurationError": 0,
    "Draining": 0,
    "GrammarError": 0,
    "ModelLoadError": 0,
    "PromptTooLong": 0,
    "Refused": 1,
    "TemplateError": 0,
    "ToolError": 0,
    "Unavailable": 0,
    "Unserved": 1,
    "UsageError": 0,
    "ValidationError": 0,
}
COVERED = (
    "cli/",
    "cluster/",
    "conversion/",
    "devices.py",
    "hub",
    "launcher.py",
    "model/",
    "router/",
    "settings/",
)
ELSEWHERE = "router/http/wire/server.py"  # its own listeners: the launcher binds instead


def raised() -> Iterator[tuple[str, str]]:
    """Yield (place, message) of every error for people whose message is written where it is."""
    for name, tree in modules(*COVERED):
        if name == ELSEWHERE:
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.Raise):
                continue
            call = node.exc
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
                continue
            position = SHOWN.get(call.func.id, len(call.args))
            for message in call.args[position : position + 1]:
                if isinstance(message, ast.Constant | ast.JoinedStr):
                    yield f"{name}:{node.lineno}", squeezed(next(texts(message)))


def test_every_message_that_is_raised_is_documented() -> None:
    rows = [squeezed(row) for row in documented()]
    found = list(raised())
    assert len(found) > 50
    missing = [each for each in found if not any(row in each[1] for row in rows)]
    assert not [(place, text) for place, text in missing if text.strip(HOLE)]
