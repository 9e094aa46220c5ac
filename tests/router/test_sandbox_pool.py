"""What is asked of processes that may die of it: those that never come to be."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest

from tgi_trio.router.sandbox_pool import Sandbox, SandboxCannotStart, SandboxPool, SandboxRefused

pytestmark = pytest.mark.trio


async def test_a_process_that_the_machine_refuses_is_one_that_cannot_start(tmp_path: Path) -> None:
    """So says the operating system where there are too many, or no memory for one."""
    gc.collect()  # files of earlier tests are closed now, and not meanwhile
    before = set(os.listdir("/proc/self/fd"))
    sandbox = Sandbox("tests", [str(tmp_path / "missing")], workers=1, results=True)
    pool = SandboxPool(sandbox, "busy")
    for _ in range(2):  # the turn has been given back
        async with pool.turn() as turn:
            with pytest.raises(
                SandboxCannotStart,
                match=r"process for tests cannot start: No such file or directory: .*missing$",
            ):
                await turn.ask("anything", within=1.0)
    assert set(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize(
    ("end", "refused", "text"),
    [
        ("os.kill(os.getpid(), 9)", True, "the process for tests was killed while it started"),
        ("sys.exit(1)", False, "the process for tests cannot start"),
        ("os.close(1); time.sleep(0.1); sys.exit(1)", False, "cannot start"),
        ("os.kill(os.getpid(), 11)", False, "cannot start"),
    ],
)
async def test_a_process_that_is_killed_at_its_start_may_be_had_later(
    end: str, refused: bool, text: str
) -> None:
    argv = [sys.executable, "-c", f"import os, sys, time; {end}"]
    async with SandboxPool(Sandbox("tests", argv, workers=1), "busy").turn() as turn:
        with pytest.raises(SandboxCannotStart, match=text) as caught:
            await turn.begin()
    assert isinstance(caught.value, SandboxRefused) == refused
