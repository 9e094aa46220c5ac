"""Every case of a sampled test is in the suite or thorough, and files without any are not read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SAMPLED = """
import pytest

@pytest.mark.sampled(3, first=1)
@pytest.mark.parametrize("case", range(7))
def test_cases(case):
    pass

def test_once():
    pass
"""
PLAIN = """
def test_plain():
    pass
"""
BORROWED = """
from test_many import test_cases as test_others
"""
SUITE = {"test_many.py::test_cases[1]", "test_many.py::test_cases[4]", "test_many.py::test_once"}
THOROUGH = {f"test_many.py::test_cases[{i}]" for i in (0, 2, 3, 5, 6)}


def collect(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run pytest over a folder, with no plugin of tests but that one."""
    argv = [sys.executable, "-m", "pytest", "-p", "tests.support.sampled", "-c", "/dev/null"]
    argv += ["-p", "no:cacheprovider", "-p", "no:schemathesis", "-q", "--co", *words, str(folder)]
    root = Path(__file__).parents[1]
    return subprocess.run(argv, cwd=root, capture_output=True, text=True)


def names(done: subprocess.CompletedProcess[str]) -> set[str]:
    lines = [line for line in done.stdout.splitlines() if "::" in line]
    return {line.rpartition("/")[2] for line in lines}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "test_many.py").write_text(SAMPLED)
    (tmp_path / "test_plain.py").write_text(PLAIN)
    return tmp_path


def test_every_nth_case_is_in_the_suite_and_all_others_are_thorough(folder: Path) -> None:
    assert names(collect(folder, "-m", "not thorough")) == {*SUITE, "test_plain.py::test_plain"}
    assert names(collect(folder, "-m", "thorough")) == THOROUGH


def test_files_without_thorough_tests_are_read_only_where_others_are_wanted(folder: Path) -> None:
    (folder / "test_plain.py").write_text("1 / 0")
    assert collect(folder, "-m", "thorough").returncode == 0
    assert "ZeroDivisionError" in collect(folder).stdout


def test_a_mark_of_another_file_is_refused_as_nobody_would_find_it(folder: Path) -> None:
    (folder / "test_plain.py").write_text(BORROWED)
    refused = collect(folder)
    assert refused.returncode == 4
    assert "test_plain.py::test_others[0] is sampled, but not by its own file" in refused.stderr
