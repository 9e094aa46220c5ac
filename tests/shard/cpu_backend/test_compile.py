"""Kernels compiled by another process, beside ours or ahead of time, and opened as object files."""

from __future__ import annotations

import errno
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import llvmlite.ir as ir
import numpy as np
import pytest

from tgi_trio.demo import model_path
from tgi_trio.shard.cpu_backend import __main__ as ahead
from tgi_trio.shard.cpu_backend import loading
from tgi_trio.shard.cpu_backend.arena import address
from tgi_trio.shard.cpu_backend.machine_code import making, parallel, store
from tgi_trio.shard.cpu_backend.machine_code.entry import DRAW_UNIFORMS, EXPAND, SHRINK, SHUFFLE
from tgi_trio.shard.cpu_backend.machine_code.object_files import SYMBOL, make_object, open_object
from tgi_trio.shard.cpu_backend.machine_code.object_symbols import missing_symbols
from tgi_trio.shard.cpu_backend.machine_code.parallel import Kernel, compile_in_parallel
from tgi_trio.shard.cpu_backend.multiplier import Multiplier
from tgi_trio.shard.cpu_backend.needed_kernels import list_kernels
from tgi_trio.shard.cpu_backend.unsupported import UnsupportedError
from tgi_trio.shard.cpu_backend.variant import Variant
from tgi_trio.shard.cpu_backend.weight_layout import Storage

BOTH: Sequence[Kernel] = [(DRAW_UNIFORMS, None), (SHUFFLE, None)]
I64, I32 = ir.IntType(64), ir.IntType(32)


@pytest.fixture
def empty_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("KERNEL_CACHE_DIR", str(tmp_path))
    store.find_folder.cache_clear()
    yield
    store.find_folder.cache_clear()


def test_where_nothing_can_be_written_kernels_are_made_anew_and_a_warning_says_so(
    empty_store: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def refuse() -> NoReturn:  # as `tempfile` does on a read-only file system
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(store, "tempfile", SimpleNamespace(gettempdir=refuse))
    (tmp_path / "file").touch()
    for name in ("KERNEL_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "file"))
    assert store.find_or_make("x", lambda: b"code") == b"code"
    assert store.is_kept("x")
    store.make_alone("x", lambda: b"code")
    assert capfd.readouterr().err.count("<4>there is no folder to keep compiled kernels in") == 1


def test_another_process_compiles_what_comes_last_and_ends_with_the_block(
    empty_store: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "usable_cores", lambda: [0, 1])
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(*given: object, **more: object) -> subprocess.Popen[bytes]:
        started.append(popen(*given, **more))  # type: ignore[call-overload]
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(RuntimeError, match="no weights"), compile_in_parallel(BOTH):
        while not SHUFFLE.is_kept():
            time.sleep(0.01)
        raise RuntimeError("no weights")
    (process,) = started
    assert process.returncode is not None
    monkeypatch.setattr(making, "make_optimised", None)  # it is not needed any more
    ids, draws = np.arange(9), np.arange(8)
    SHUFFLE.open()(address(ids), 9, address(draws), 8)
    assert sorted(ids.tolist()) == list(range(9))


@pytest.mark.parametrize(("cores", "helpers"), [(1, 0), (2, 1), (64, 1)])
def test_there_are_as_many_processes_as_help(
    cores: int, helpers: int, empty_store: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This one compiles as well."""
    run: list[bytes] = []

    @contextmanager
    def note(text: bytes) -> Iterator[None]:
        run.append(text)
        yield

    monkeypatch.setattr(parallel, "_run_beside", note)
    monkeypatch.setattr(parallel, "usable_cores", lambda: list(range(cores)))
    with compile_in_parallel(BOTH):
        assert len(run) == helpers
    store.find_or_make(SHUFFLE.file_name(None), lambda: b"code")
    with compile_in_parallel(BOTH):  # one is missing, which is for us
        assert len(run) == helpers


def test_models_of_a_dtype_share_what_computes_their_adapters() -> None:
    """However their heads and weights are: a second model's adapters wait for no compiler."""
    plain, whole, half = Storage("float32"), Storage("int8"), Storage("bfloat16")
    cache = Storage("fp8_e5m2")

    def kept(variant: Variant) -> set[str]:
        wanted = list_kernels(variant, (), (), adapters=True)
        return {entry.file_name(choice) for entry, choice in wanted if entry in (SHRINK, EXPAND)}

    one = kept(Variant(plain, plain, plain, heads=2, value_vectors=2, rows=8, tokens=4))
    assert len(one) == 2
    assert kept(Variant(whole, plain, cache, heads=3, value_vectors=4, rows=8, tokens=1)) == one
    other = kept(Variant(half, half, half, heads=2, value_vectors=2, rows=8, tokens=4))
    assert not one & other


def test_a_server_whose_kernels_are_kept_does_without_their_compiler() -> None:
    assert ahead.main([str(model_path())]) == 0
    program = "import sys; from tgi_trio.shard.cpu_backend.__main__ import main; "
    program += "code = main(sys.argv[1:]); "
    program += "sys.exit(code or 2 * ('tgi_trio.shard.cpu_backend.kernels' in sys.modules))"
    process = subprocess.run([sys.executable, "-c", program, model_path()], check=False)
    assert process.returncode == 0


def call_of(name: str, symbol: str) -> bytes:
    """Return an object file in which `symbol` calls the function `name`."""
    module = ir.Module()
    kind = ir.FunctionType(I32, [I64])
    builder = ir.IRBuilder(ir.Function(module, kind, symbol).append_basic_block())
    number = builder.function.args[0]
    builder.ret(builder.call(ir.Function(module, kind, name), [number]))
    return make_object(module)


def test_what_an_object_file_lacks_is_told() -> None:
    assert missing_symbols(call_of("labs", SYMBOL)) == ["labs"]
    assert open_object(call_of("labs", SYMBOL), 1)(-7) == 7
    with pytest.raises(RuntimeError, match="no function 'run'"):
        open_object(call_of("labs", "walk"), 1)


def test_a_kernel_that_calls_what_is_not_there_is_not_kept(
    empty_store: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LLVM would end a process that opens it."""
    monkeypatch.setattr(making, "missing_symbols", lambda data: ["sched_yield", "missing"])
    with pytest.raises(RuntimeError, match=r"what is not there: missing$"):
        SHUFFLE.compile(None)


def test_kernels_that_find_no_room_are_told(
    empty_store: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A start goes on without; what compiles ahead has done nothing."""
    store.find_folder()
    shutil.rmtree(tmp_path)
    with compile_in_parallel(BOTH[:1]):
        DRAW_UNIFORMS.compile_alone(None)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("<4>1 of 1 compiled kernels could not be kept in ")
    store.find_folder.cache_clear()
    words = "compiled kernels could not be kept"
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (100, 100))  # as a full disk
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # it would leave modules that are cut off
    program = [sys.executable, "-m", "tgi_trio.shard.cpu_backend", str(model_path())]
    process = subprocess.run(program, preexec_fn=limit, stderr=-1, text=True, check=False)
    (line,) = process.stderr.splitlines()
    assert process.returncode == 1 and re.match(rf"(\d+) of \1 {words} in {tmp_path}", line)


def test_compiling_ahead_where_nothing_can_be_kept_is_refused(
    empty_store: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(store, "_places", lambda: [tmp_path / "file" / "folder"])
    monkeypatch.setattr(ahead, "load_cpu_runner", None)  # nothing is compiled in vain
    (tmp_path / "file").touch()
    assert ahead.main([str(model_path())]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("there is no folder to keep compiled kernels in, so that each start")


def test_what_the_system_refuses_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(ahead, "load_cpu_runner", refuse)
    assert ahead.main([str(model_path())]) == 1
    found = capsys.readouterr().err
    assert found.startswith("the CPU kernels cannot serve ") and "allocate memory" in found


def test_a_format_that_the_checkpoint_does_not_have_is_refused_as_by_a_server(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ahead.main([str(model_path()), "--quantize", "awq"]) == 1
    assert "--quantize awq contradicts" in capsys.readouterr().err


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
        (["here", "--activations", "4"], "--activations: invalid choice: "),
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
        (["--quantize", "q4_0"], 8, "float32"),
        (["--quantize", "q4_0", "--activations", "16"], 16, "float32"),
        (["--quantize", "q4_0", "--kv-cache-dtype", "fp8_e5m2"], 8, "fp8_e5m2"),
    ],
)
def test_what_is_compiled_ahead_is_what_the_same_flags_serve(
    words: list[str], bits: int, kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels for activations of 8 bits are others than those for 16, and so with K and V."""
    asked: list[tuple[str, int, str]] = []

    def note(wanted: Sequence[Kernel], report: object) -> NoReturn:
        (cache,) = (each.cache for _, each in wanted if isinstance(each, Variant))
        products = (each for _, each in wanted if isinstance(each, Multiplier))
        asked.extend((each.kind.name, each.active_bits, cache.numbers) for each in products)
        raise UnsupportedError("enough is known")

    monkeypatch.setattr(loading, "compile_in_parallel", note)
    assert ahead.main([str(model_path()), *words]) == 1
    assert asked == [("q4_0", bits, kv)]
