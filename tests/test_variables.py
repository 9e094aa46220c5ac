"""A test that leaves another environment fails, and the next one has that of before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TESTS = """
import os
import pytest

@pytest.fixture(scope="module")
def added():
    os.environ["ADDED"] = "1"

@pytest.fixture
def lent(monkeypatch):
    monkeypatch.setenv("KEPT", "2")

def test_adds(added):
    pass

def test_changes_and_removes():
    os.environ["KEPT"] = "2"
    del os.environ["GONE"]

def test_fails_itself():
    os.environ["ADDED"] = "1"
    assert os.environ["ADDED"] == "2"

def test_borrows(lent):
    assert (os.environ["KEPT"], os.environ["GONE"]) == ("2", "1")

def test_finds_what_was():
    assert (os.environ["KEPT"], os.environ["GONE"]) == ("1", "1")
    assert "ADDED" not in os.environ
"""


def test_who_leaves_another_environment_is_told(tmp_path: Path) -> None:
    path = tmp_path / "test_leaving.py"
    path.write_text(TESTS)
    argv = [sys.executable, "-m", "pytest", "-p", "tests.support.variables", "-c", "/dev/null"]
    argv += ["-p", "no:cacheprovider", "-p", "no:schemathesis", "-rA", "--tb=no", str(path)]
    env = {"KEPT": "1", "GONE": "1", "COLUMNS": "200"}
    root = Path(__file__).parents[1]
    said = subprocess.run(argv, cwd=root, env=env, capture_output=True, text=True).stdout
    found = [line for line in said.splitlines() if "::" in line and " " in line]
    outcomes = {(*line.split("::")[1].split(" - "), line.split()[0]) for line in found}
    left = "AssertionError: the test leaves these variables changed:"
    assert {each for each in outcomes if each[-1] != "PASSED"} == {
        ("test_adds", f"{left} ADDED", "ERROR"),
        ("test_changes_and_removes", f"{left} GONE, KEPT", "ERROR"),
        ("test_fails_itself", f"{left} ADDED", "ERROR"),
        ("test_fails_itself", "AssertionError: assert '1' == '2'", "FAILED"),
    }
    passed = {each[0] for each in outcomes if each[-1] == "PASSED"}
    assert {"test_borrows", "test_finds_what_was"} <= passed
