"""What is forked ends as a new interpreter does, and has imported nothing too early."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.warm_children import kind_for
from tests.support.warm_start import run_warm

LATE = """
import atexit, threading, time
class Kept:
    __del__ = lambda self: print("taken apart")
kept = Kept()
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.05), print("thread"))).start()
print("done")
"""


@pytest.mark.parametrize(
    ("program", "code", "out", "err"),
    [
        (LATE, 0, "done\nthread\nat exit\n", ""),
        ("import sys; print(1, end=''); sys.exit(3)", 3, "1", ""),
        ("import sys; sys.exit(True)", 1, "", ""),
        ("import sys; sys.exit(-1)", 255, "", ""),
        ("import sys; sys.exit('why')", 1, "", "why\n"),
        ("import os; os.kill(os.getpid(), 15)", -15, "", ""),
    ],
)
def test_a_process_ends_as_its_program_does(program: str, code: int, out: str, err: str) -> None:
    done = run_warm("-c", program)
    assert (done.returncode, done.stdout, done.stderr) == (code, out, err)


def test_what_a_program_raises_is_shown() -> None:
    done = run_warm("-c", "1 / 0")
    assert done.returncode == 1
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


WHO_FORKS = """
from tests.support.warm_start import run_warm
print(run_warm("-c", "import os; print(os.getppid())").stdout)
"""


def test_what_forks_ends_before_who_asked_for_it() -> None:
    done = subprocess.run([sys.executable, "-c", WHO_FORKS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not Path(f"/proc/{int(done.stdout)}").exists()


@pytest.mark.parametrize(
    ("kind", "there"),
    [
        ("fake", []),
        ("plain", ["torch"]),
        ("real", ["torch", "transformers.modeling_utils"]),
    ],
)
def test_what_is_forked_has_imported_what_its_kind_needs(kind: str, there: list[str]) -> None:
    """Each kind is forked off the one before it, which has not imported what comes with it."""
    names = ["torch", "transformers.modeling_utils"]
    done = run_warm("-c", f"import sys; print(*(set({names}) & sys.modules.keys()))", shards=kind)
    assert (sorted(done.stdout.split()), done.stderr) == (there, "")


def test_what_converts_tokenizers_has_imported_them_without_torch() -> None:
    names = ["torch", "transformers.models.auto.tokenization_auto"]
    program = f"import sys; print([bool(sys.modules.get(name)) for name in {names}])"
    done = run_warm("-c", program, imports="texts")
    assert (done.stdout, done.stderr) == ("[False, True]\n", "")


@pytest.mark.parametrize(
    ("shards", "variables", "kind"),
    [
        ("real", {}, "real"),
        ("real", {"HF_HOME": "/cache", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}, "real"),
        ("real", {"HF_HOME": "/other"}, "plain"),
        ("real", {"HF_HOME": "/cache", "XDG_CACHE_HOME": "/other"}, "real"),
        ("real", {"HF_HOME": "", "XDG_CACHE_HOME": "/other"}, "plain"),
        ("real", {"HF_TOKEN": "a"}, "plain"),
        ("fake", {"HF_HOME": "/other"}, "fake"),
    ],
)
def test_variables_of_the_hub_are_read_anew(
    shards: str, variables: dict[str, str], kind: str
) -> None:
    early = {"HF_HOME": "/cache"}
    assert kind_for(shards, early | variables, early) == kind
