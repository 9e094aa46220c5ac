"""The walk of one request in docs/architecture.md is the one that a request takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.test_imports import PACKAGE
from tools.walk.request import of_one_request, trace_request

ROOT = Path(__file__).parents[2]
LONGEST = 40  # files: more is no walk that one makes in one sitting

_SECTION = (ROOT / "docs/architecture.md").read_text().split("\n## One request, file by file\n")[1]
WALK, BESIDE = _SECTION.split("\n## ")[0].split("\n### Beside the walk\n")
HAND_OVERS = {
    "router/http/generation.py": "to the engine's task",
    "router/engine/shard_link.py": "to the shard's process",
    "shard/loop/reporting.py": "to the router's process",
}


def walk() -> list[str]:
    """Return the numbered files, in order."""
    steps = re.findall(r"^(\d+)\. `([\w/.]+\.py)`", WALK, re.MULTILINE)
    assert [int(number) for number, _ in steps] == list(range(1, len(steps) + 1))
    return [file for _, file in steps]


def named_beside(file: str) -> bool:
    """Whether a file is named there, as a whole or without folders above it."""
    names = re.findall(r"`([\w/.]+\.py)`", BESIDE)
    return any(f"/{file}".endswith(f"/{name}") for name in names)


def test_it_names_at_most_40_files_and_each_is_there() -> None:
    assert 30 < len(walk()) <= LONGEST
    assert len(set(walk())) == len(walk())
    assert not [file for file in walk() if not (PACKAGE / file).exists()]


def test_where_control_passes_the_code_and_the_walk_say_so() -> None:
    for file, to in HAND_OVERS.items():
        assert f"Control passes {to}" in (PACKAGE / file).read_text(), file
    said = re.findall(r"\*\*Here control\s+passes\s+([^*]+?)\.?\*\*", WALK)
    assert sorted(" ".join(each.split()) for each in said) == [
        "back to the router's process",
        "to the engine's task",
        "to the shard's process",
    ]


def test_what_others_do_meanwhile_is_no_part_of_the_walk() -> None:
    """A look at garbage, ten times a second, entered app.py and engine.py before the request."""
    calls = [
        (1, "connection.py", "serve_counted 3"),
        (2, "server.py", "run 1"),
        (9, "connection.py", "serve_counted 3"),  # of the request before
        (10, "router/garbage.py", "collect_in_between 2"),
        (11, "router/http/app.py", "collect_in_between 2"),
        (12, "server.py", "run 1"),
        (13, "connection.py", "serve_counted 5"),
        (14, "router/http/app.py", "_answer 6"),
        (15, "tokenizer.py", ""),
        (16, "engine.py", "_serve 0"),
    ]
    assert of_one_request(calls, 8) == [
        (12, "server.py"),
        (13, "connection.py"),
        (14, "router/http/app.py"),
        (15, "tokenizer.py"),
        (16, "engine.py"),
    ]


@pytest.mark.system
def test_a_real_request_goes_this_way() -> None:
    """Every file of the walk is entered, in this order, and no other that is not named."""
    calls = trace_request("--cpu-backend", "kernels")
    entered = list(dict.fromkeys(file for _, file in calls))
    assert not [file for file in walk() if file not in entered], "not entered"
    assert not [file for file in entered if file not in walk() and not named_beside(file)], (
        "entered, and neither in the walk nor beside it"
    )
    # What both processes enter is told where the router does; the shard is told after it.
    shard = [file for process, file in calls if process == "shard"]
    router = [file for process, file in calls if process == "router"]
    for files in (router, shard):
        both = [file for file in walk() if file in files]
        if files is shard:
            both = [file for file in both if file not in router]
        assert both == [file for file in files if file in both]
