"""Conversions that are forked make what those in a new interpreter make."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.router.text.test_sentence_pieces import LLAMA, convert
from tests.support import warm_conversions
from tests.support.warm_conversions import Converters
from tgi_trio.router.text import tokenizer_files


def run(folder: Path, target: Path, trust: str, env: dict[str, str]) -> int:
    words = ["-c", tokenizer_files._CONVERT, str(folder), str(target), trust]
    done = Converters().run(
        [sys.executable, *words], env=env, capture_output=True, text=True, timeout=200, check=False
    )
    return done.returncode


def test_a_forked_conversion_makes_the_same_files(tmp_path: Path) -> None:
    convert(tmp_path, "llama", LLAMA, {})
    env = os.environ | tokenizer_files._CONVERSION_ENV
    assert run(tmp_path, tmp_path / "forked", "0", env) == 0
    assert run(tmp_path, tmp_path / "started", "0", env | {"HF_TOKEN": "a"}) == 0  # read early
    made, expected = (
        {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()}
        for name in ("forked", "started")
    )
    assert made == expected and "tokenizer.json" in made


@pytest.mark.parametrize(
    ("trust", "variables", "forked"),
    [("0", {}, True), ("1", {}, False), ("0", {"HF_HUB_OFFLINE": "0"}, False)],
)
def test_what_may_run_code_of_others_is_not_forked(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    trust: str,
    variables: dict[str, str],
    forked: bool,
) -> None:
    """Nor what reads other variables than those that were there at the imports."""
    ways: list[bool] = []

    def way(is_fork: bool) -> object:
        def take(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
            ways.append(is_fork)
            return subprocess.CompletedProcess([], 0, "", "")

        return take

    monkeypatch.setattr(warm_conversions, "run_warm", way(True))
    monkeypatch.setattr(subprocess, "run", way(False))
    env = os.environ | tokenizer_files._CONVERSION_ENV | variables
    run(tmp_path, tmp_path / "made", trust, env)
    assert ways == [forked]
