"""Commands of documents beside `tgi_trio`: what they run is there, and takes what they give it."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.cli.test_docs import PAGES, ROOT
from tgi_trio.cli.commands import COMMANDS

OURS = r"python -m ((?:bench|tools|tests|tgi_trio)\b[\w.]*)([^`|\n]*)"
BLOCK = re.compile(r"^```(\w*)\n(.+?)^```", re.DOTALL | re.MULTILINE)


def read(document: str) -> str:
    return (ROOT / document).read_text().replace("\\\n", " ")


def find_source(module: str) -> str:
    """Return the texts of a module, or of all of a package that can be run.

    Flags of a benchmark are often those of its room.
    """
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, f"there is no {module}"
    path = Path(spec.origin)
    if path.name == "__init__.py":
        assert (path.parent / "__main__.py").exists(), f"{module} cannot be run"
    return "".join(each.read_text() for each in sorted(path.parent.glob("*.py")))


@pytest.mark.parametrize("document", PAGES)
def test_modules_that_are_run_are_there_with_their_flags(document: str) -> None:
    shared = "".join(path.read_text() for path in sorted((ROOT / "bench/harness").glob("*.py")))
    # `tools.two_nodes` passes them on.
    passed = {f"--{flag.name}" for command in COMMANDS for flag in command.flags}
    for module, rest in re.findall(OURS, read(document)):
        if module == "tgi_trio":
            continue  # `test_commands_of_documents_can_be_typed` parses these
        source = find_source(module.rstrip(".")) + shared
        for flag in re.findall(r"(?<!\S)--[a-z][a-z-]*", rest.partition(" #")[0]):
            known = f'"{flag}"' in source or (module.startswith("tools.") and flag in passed)
            assert known, f"{document}: {module} has no {flag}"


@pytest.mark.parametrize("document", PAGES)
def test_targets_of_make_are_there(document: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    text = read(document)
    commands = re.findall(r"`make ([^`\n]+)`|^\$ make ([^#\n]+)", text, re.MULTILINE)
    for words in (inline or block for inline, block in commands):
        target, *rest = words.split()
        assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), f"make {target}"
        for variable in re.findall(r"(?:^|\s)([A-Z]+)=", " ".join(rest)):
            assert f"$({variable})" in makefile, f"make {target} {variable}="


@pytest.mark.parametrize("document", PAGES)
def test_what_is_written_in_a_language_can_be_read(document: str) -> None:
    readers = {"json": json.loads, "toml": tomllib.loads, "yaml": yaml.safe_load}
    for language, text in BLOCK.findall((ROOT / document).read_text()):
        if language == "python":
            ast.parse(text)
        elif language in readers:
            readers[language](text)
