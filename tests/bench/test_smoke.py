"""Every benchmark that a document names runs to its end, in its smallest form."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from bench.harness import checkpoints
from bench.model.subjects import write_gguf
from tests.bench.smoke import RUN_ELSEWHERE, SMALL, WITHOUT_RESULTS
from tgi_trio.ipc.parent import die_with_parent

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMAND = re.compile(r"python -m ((?:bench|tests\.stress)\.[\w.]+)([^`\n]*(?:\n[^`\n]*)?)")
LONGEST = 600  # seconds, on a machine that has a lot of other things to do


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny checkpoint, and its GGUF file."""
    folder = tmp_path_factory.mktemp("checkpoints")
    write_gguf(checkpoints.make("tiny", folder / "tgi-trio-tiny"))
    return folder


class Forker:
    """A process that others are forked off, see `forked.py`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, module: str, arguments: list[str], folder: Path) -> tuple[int, str, str]:
        """Return a module's exit code and what it has printed, to a new `folder`'s files."""
        output, errors = folder / "output", folder / "errors"
        told = {"module": module, "arguments": arguments, "seconds": LONGEST}
        told |= {"output": str(output), "errors": str(errors)}
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(told), file=self._process.stdin, flush=True)
        code = int(self._process.stdout.readline())
        return code, output.read_text(), errors.read_text()


@pytest.fixture(scope="session")
def forker() -> Iterator[Forker]:
    argv = [sys.executable, "-m", "tests.bench.forked"]
    with subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        preexec_fn=partial(die_with_parent, os.getpid()),
    ) as process:
        yield Forker(process)


# The process's own end comes first: whoever gave up on it would leave its exit code to the next.
@pytest.mark.sampled(9, first=1)
@pytest.mark.timeout(LONGEST + 300)
@pytest.mark.system
@pytest.mark.parametrize("module", [each for each in SMALL if each not in RUN_ELSEWHERE])
def test_a_benchmark_runs_to_its_end(
    module: str, folder: Path, forker: Forker, tmp_path: Path
) -> None:
    line = SMALL[module].replace("CHECKPOINTS", str(folder)).replace("NEW", str(tmp_path / "new"))
    written = tmp_path / "out" / "results.json"
    if module not in WITHOUT_RESULTS:
        line += f" --json {written}"
    code, said, errors = forker.run(module, shlex.split(line), tmp_path)
    assert code == 0, said + errors
    assert said.strip()
    if module not in WITHOUT_RESULTS:
        found = json.loads(written.read_text())
        assert (found["schema"], found["bench"]) == (1, module.partition(".")[2])
        assert "failed" not in found
        assert found.keys() > {"schema", "bench", "machine"}


def documented() -> list[tuple[str, str]]:
    """Return every command of a document: the module, and the rest of the line."""
    return [
        (found[1], found[2]) for path in DOCUMENTS for found in COMMAND.finditer(path.read_text())
    ]


def test_every_documented_benchmark_is_among_them() -> None:
    named = {module for module, _ in documented()}
    assert len(named) > 15
    assert named <= SMALL.keys()


def test_every_documented_flag_is_one() -> None:
    """Flags are looked for where they are added, `--json` in `bench.harness.stats`."""
    shared = (ROOT / "bench" / "harness" / "stats.py").read_text()
    for module, rest in documented():
        path = ROOT / Path(*module.split("."))
        path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
        source = path.read_text() + shared
        for flag in re.findall(r"(?<!\S)--[a-z][\w-]*", rest.partition("`")[0]):
            assert f'"{flag}"' in source, f"{module} has no {flag}"


def test_whoever_writes_results_keeps_them_when_something_fails() -> None:
    """`stats.reporting` does; parts that are processes of their own keep each row."""
    for module in SMALL.keys() - WITHOUT_RESULTS - {"bench.device"}:
        path = ROOT / Path(*module.split("."))
        path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
        assert "reporting(" in path.read_text(), module
