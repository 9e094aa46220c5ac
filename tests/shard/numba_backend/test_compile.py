"""Kernels compiled by another process, beside ours or ahead of time."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tgi_trio.demo import model_path
from tgi_trio.shard.numba_backend import __main__ as ahead
from tgi_trio.shard.numba_backend import (
    kernels,
    parallel_compilation,
    sampler_self_test,
    verified,
)
from tgi_trio.shard.numba_backend.kernels.sampling.rows import work_on_rows
from tgi_trio.shard.numba_backend.multiplier import Multiplier
from tgi_trio.shard.numba_backend.parallel_compilation import compile_in_parallel
from tgi_trio.shard.numba_backend.unsupported import UnsupportedError


@pytest.fixture
def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function text -> name of a module for `python -m`; `here` in it is tmp_path."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(parallel_compilation, "is_missing", lambda kernel: True)
    monkeypatch.setattr(parallel_compilation, "usable_cores", lambda: [0, 1])

    def make(text: str) -> str:
        lines = ["import os, pathlib, time", f"here = pathlib.Path({str(tmp_path)!r})", text]
        (tmp_path / "helper_module.py").write_text("\n".join(lines))
        return "helper_module"

    return make


def test_the_end_of_the_block_waits_for_the_other_process(helper: Any, tmp_path: Path) -> None:
    text = """while not (here / 'go').exists(): time.sleep(0.01)
time.sleep(0.2)
(here / 'done').touch()"""
    with compile_in_parallel(work_on_rows, helper(text)):
        assert not (tmp_path / "done").exists()
        (tmp_path / "go").touch()
    assert (tmp_path / "done").exists()


def test_the_other_process_ends_with_a_block_that_fails(helper: Any, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    text = "(here / 'new').write_text(str(os.getpid())); (here / 'new').rename(here / 'pid')"
    with (
        pytest.raises(RuntimeError, match="no weights"),
        compile_in_parallel(work_on_rows, helper(f"{text}; time.sleep(600)")),
    ):
        while not pid_file.exists():
            time.sleep(0.01)
        raise RuntimeError("no weights")
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


@pytest.mark.parametrize(("missing", "cores"), [(False, [0, 1]), (True, [0])])
def test_no_process_where_it_would_not_help(
    missing: bool, cores: list[int], helper: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_compilation, "is_missing", lambda kernel: missing)
    monkeypatch.setattr(parallel_compilation, "usable_cores", lambda: cores)
    with compile_in_parallel(work_on_rows, helper("(here / 'done').touch()")):
        pass
    assert not (tmp_path / "done").exists()


def test_a_compiled_kernel_is_known_by_its_file() -> None:
    if kernels._FOLDER is None:
        pytest.skip("there is no place for a cache")
    assert sampler_self_test.find_fault() is None
    assert not kernels.is_missing(work_on_rows)
    assert kernels.is_missing(test_a_compiled_kernel_is_known_by_its_file)


def test_a_package_elsewhere_finds_what_was_compiled() -> None:
    """The folder is named by what kernels are, and what is in it by their place among them."""
    if kernels._FOLDER is None:
        pytest.skip("there is no place for a cache")
    assert Path(work_on_rows.stats.cache_path) == kernels._FOLDER / "kernels_sampling"


def test_a_model_that_the_kernels_do_not_fit_is_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "zamba", "vocab_size": 10}')
    assert ahead.main([str(tmp_path)]) == 1
    assert "the model runs through transformers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ([], "FOLDER"),
        (["here", "--activations", "4"], "--activations: invalid choice: 4"),
        (["here", "--quantize", "q9"], "--quantize: invalid choice: 'q9'"),
        (["here", "--kv-cache-dtype", "int8"], "--kv-cache-dtype: invalid choice: 'int8'"),
    ],
)
def test_flags_that_no_server_takes(
    words: list[str], wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        ahead.main(words)
    assert ended.value.code == 2
    assert wrong in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "bits", "kv"),
    [
        (["--quantize", "q4_0"], 8, None),
        (["--quantize", "q4_0", "--activations", "16"], 16, None),
        (["--quantize", "q4_0", "--kv-cache-dtype", "fp8_e5m2"], 8, "fp8_e5m2"),
    ],
)
def test_what_is_compiled_ahead_is_what_the_same_flags_serve(
    words: list[str], bits: int, kv: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels for activations of 8 bits are others than those for 16, and so with K and V."""
    asked: list[tuple[str, int, str | None]] = []

    def note(
        *_: Any, multipliers: Sequence[Multiplier], kv_dtype: str | None, **__: Any
    ) -> NoReturn:
        asked.extend((each.kind.name, each.active_bits, kv_dtype) for each in multipliers)
        raise UnsupportedError("enough is known")

    monkeypatch.setattr(verified, "choose_variant", note)
    assert ahead.main([str(model_path()), *words]) == 1
    assert asked == [("q4_0", bits, kv)]
