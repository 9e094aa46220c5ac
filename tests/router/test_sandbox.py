"""What is asked of processes that may die of it: those that never come to be."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from tgi_trio.router.sandbox import Sandbox, SandboxCannotStart, SandboxPool

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
                SandboxCannotStart, match=r"process for tests cannot start: .*missing"
            ):
                await turn.ask("anything", within=1.0)
    assert set(os.listdir("/proc/self/fd")) <= before
