"""Kernels that several processes want at once: one compiles them."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from numba import config, njit

from tests.warm_start import start_warm
from tgi_trio.shard.numba_backend.kernels.once import compile_once, held

# Says that it begins, and then how many versions it found, and how many it compiled.
PROGRAM = """
import sys
from pathlib import Path
folder = Path(sys.argv[1])
sys.path.insert(0, str(folder))
from numba import config, njit
from tgi_trio.shard.numba_backend.kernels.once import compile_once
from twice import twice
config.CACHE_DIR = str(folder / "cache")  # in place of the kernels'
made = compile_once(njit(cache=True)(twice), folder)
print("asks", flush=True)
assert made(4) == 8
print(sum(made.stats.cache_hits.values()), sum(made.stats.cache_misses.values()), flush=True)
"""


@pytest.fixture
def twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], int]:
    """A function that other processes find too, in an empty cache of its own."""
    (tmp_path / "twice.py").write_text("def twice(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "cache"))
    from twice import twice  # type: ignore[import-not-found]

    monkeypatch.delitem(sys.modules, "twice")
    found: Callable[[int], int] = twice
    return found


def test_who_waits_finds_what_the_other_process_has_compiled(
    twice: Callable[[int], int], tmp_path: Path
) -> None:
    read, write = os.pipe()
    with open(read) as said:
        made: Any = njit(cache=True)(twice)
        compile_here = made.compile
        process: Any = None

        def compile_beside(signature: Any) -> Any:
            """Compile once another process wants the same, or has it already."""
            nonlocal process
            process = start_warm(["-c", PROGRAM, str(tmp_path)], write, 2)
            os.close(write)
            assert said.readline() == "asks\n"
            return compile_here(signature)

        made.compile = compile_beside
        assert compile_once(made, tmp_path)(3) == 6
        assert said.readline() == "1 0\n"
        assert process.wait(60) == 0


def test_a_kernel_that_cannot_be_compiled_is_not_held(tmp_path: Path) -> None:
    def wrong(x: Any) -> Any:
        return x.nothing_of_it

    made = compile_once(njit(cache=True)(wrong), tmp_path)
    for _ in range(2):
        with pytest.raises(Exception, match="nothing_of_it"):
            made(3)
    (lock,) = tmp_path.glob("*.lock")
    with held(lock, patience=0.0) as ours:
        assert ours


def test_types_are_compiled_beside_each_other_and_written_down_after_each_other(
    twice: Callable[[int], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one process is about to write down, another one has not read yet."""
    first, second = (compile_once(njit(cache=True)(twice), tmp_path) for _ in range(2))
    plain = first._cache._cache_file._save_index

    def save_index(overloads: Any) -> None:
        with held(tmp_path / "twice.twice.lock", patience=0.0) as ours:
            assert not ours
        plain(overloads)

    monkeypatch.setattr(first._cache._cache_file, "_save_index", save_index)
    assert first(1) == 2
    assert second(1.5) == 3.0
    again: Any = njit(cache=True)(twice)
    assert (again(1), again(1.5)) == (2, 3.0)
    assert sum(again.stats.cache_hits.values()) == 2


def test_a_lock_ends_with_the_process_that_holds_it(tmp_path: Path) -> None:
    program = """
        import os, sys
        from pathlib import Path
        from tgi_trio.shard.numba_backend.kernels.once import held
        with held(Path(sys.argv[1])) as ours:
            print(ours, flush=True)
            os.kill(os.getpid(), 9)
    """
    lock = tmp_path / "lock"
    read, write = os.pipe()
    with open(read) as said:
        process = start_warm(["-c", textwrap.dedent(program), str(lock)], write, 2)
        os.close(write)
        assert said.readline() == "True\n"
        assert process.wait(60) == -9
    with held(lock, patience=0.0) as ours:
        assert ours


def test_nobody_is_waited_for_without_end(tmp_path: Path) -> None:
    with held(tmp_path / "lock") as first, held(tmp_path / "lock", patience=0.05) as second:
        assert (first, second) == (True, False)
    with held(tmp_path / "lock", patience=0.0) as third:
        assert third


def test_what_cannot_be_locked_is_compiled_all_the_same(
    twice: Callable[[int], int], tmp_path: Path
) -> None:
    assert compile_once(njit(cache=True)(twice), tmp_path / "not there")(3) == 6
