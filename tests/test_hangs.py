"""A test that hangs fails alone, and says where it waited."""

from __future__ import annotations

import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import trio

from tests.support.hangs import bounded

TESTS = """
import pytest
import threading
import trio

@pytest.mark.timeout(1)
@pytest.mark.trio
async def test_that_never_yields():
    while True:
        pass

@pytest.mark.timeout(1)
def test_that_runs_a_loop_itself():
    trio.run(trio.sleep_forever)

@pytest.mark.timeout(600)
@pytest.mark.trio
async def test_in_virtual_time_beside_a_thread(autojump_clock):
    working = threading.Event()
    await trio.to_thread.run_sync(working.wait, 0.01)
    await trio.sleep(0)

@pytest.mark.trio
async def test_that_is_bounded():
    assert trio.current_effective_deadline() < float("inf")
"""


def test_a_hang_costs_one_test(tmp_path: Path) -> None:
    path = tmp_path / "test_hanging.py"
    path.write_text(TESTS)
    argv = [sys.executable, "-m", "pytest", "-p", "tests.support.hangs", "-p", "no:cacheprovider"]
    given = ["--rootdir", str(tmp_path), "-c", "/dev/null", "--timeout", "600", "-v", str(path)]
    said = subprocess.run([*argv, *given], cwd=Path(__file__).parents[1], capture_output=True)
    lines = said.stdout.decode().splitlines()
    outcomes = [line.split("::")[1].split()[:2] for line in lines if "%]" in line]
    assert outcomes == [
        ["test_that_never_yields", "FAILED"],
        ["test_that_runs_a_loop_itself", "FAILED"],
        ["test_in_virtual_time_beside_a_thread", "PASSED"],
        ["test_that_is_bounded", "PASSED"],
    ], "\n".join(lines)


async def the_other_side() -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep_forever)


def test_what_a_test_waited_for_is_in_its_failure() -> None:
    with pytest.raises(trio.TooSlowError, match=r"no end after 0\.01 s") as caught:
        trio.run(bounded(the_other_side, 0.01))
    assert "in the_other_side" in "".join(traceback.format_exception(caught.value))
