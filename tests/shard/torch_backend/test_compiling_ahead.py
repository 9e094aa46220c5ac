"""Kernels are compiled before they are launched, for a device that is named and not there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tgi_trio.shard.torch_backend.compiling import ahead

pytest.importorskip("triton", reason="Triton is not installed")

ACTS = ("silu", "gelu", "gelu_tanh", "quick_gelu limits paired")

# A process of its own: in this one, kernels are interpreted.
COMPILE = """
import contextlib, sys
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

launched = []

class Named:
    class utils:
        load_binary = staticmethod(lambda *given: (1, 2, 10, 0, 1024))
        get_device_properties = staticmethod(lambda device: {"max_shared_mem": 227 << 10})

    def launcher_cls(self, source, metadata):
        return lambda *given: launched.append(source.name)

    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device=None: 0
    get_active_torch_device = lambda self: torch.device("cpu")
    is_active = lambda self: True
    map_python_to_cpp_type = lambda self, kind: kind

driver.set_active(Named())
from triton.compiler import ASTSource
from tgi_trio.shard.torch_backend.compiling import ahead, compilers
from tgi_trio.testing.kernel_variants import variants

ahead.runs_kernels = lambda device: True
torch.cuda.device = lambda device: contextlib.nullcontext()
found = {each.name: each for each in variants("hopper")}
variant = found[sys.argv[1]]
begin, here = ASTSource.make_ir, []

def make_ir(source, *given, **more):
    here.append(source.name)
    return begin(source, *given, **more)

ASTSource.make_ir = make_ir  # what this process compiles
cores = 2
compilers.usable_cores = lambda: list(range(cores))

def argument(kind):
    return torch.empty(64, dtype=kind) if not isinstance(kind, str) else 16 if "i" in kind else 1.5

def launch():
    given = [argument(kind) for kind in variant.arguments]
    assert not compiling or not any(x.any() for x in given if isinstance(x, torch.Tensor))
    for _ in range(2):
        variant.kernel[(1,)](*given, **variant.constants, num_warps=variant.warps)

def fail():
    launch()
    raise ValueError("not this way")

compiling = True
device = torch.device("cuda")
print(ahead.compile_ahead(device, launch), launched, here)
compiling, anew = False, []
knobs.runtime.jit_cache_hook = lambda **told: anew.append(told["fn"].name) and False
launch()
print(anew, len(launched))
compiling = True
print(ahead.compile_ahead(device, launch), len(launched))
print(ahead.compile_ahead(device, fail), len(launched))
compiling = False
launch()
print(anew, len(launched), here)
cores, compiling, variant = 1, True, found[sys.argv[2]]
print(ahead.compile_ahead(device, launch), len(launched), here)
cores, compiling, variant = 2, False, found[sys.argv[3]]
ahead.begin_early(device)
for _ in range(2):
    ahead.compile_beside(device, launch, "asked for once")
print(len(launched))
print(ahead.compile_ahead(device, lambda: None), len(launched), here)
ahead.compile_beside(device, launch, "at once")
print(len(launched))
compiling, variant, ahead._make = True, found[sys.argv[4]], lambda *given: 1 / 0
print(ahead.compile_ahead(device, launch), len(launched))
compiling = False
launch()
print(len(launched), here)
assert "torch._dynamo" not in sys.modules  # two seconds
"""


def test_what_is_launched_later_has_been_compiled(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    argv = [sys.executable, "-c", COMPILE, *(f"gate bf16 {act}" for act in ACTS)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    by_another, by_itself = "1 [] []", "1 4 ['gate']"
    # What is compiled already does not run, either.
    told = [by_another, "[] 2", "0 2", "0 2", "[] 4 []", by_itself]
    told += ["4", "1 6 ['gate']", "8"]  # early, by another: launched once it is there
    told += ["0 8", "10 ['gate', 'gate']"]  # where it does not compile ahead
    assert done.stdout.splitlines() == told
    assert "not this way" in done.stderr and "where they are launched first" in done.stderr


def test_nothing_is_launched_to_be_compiled_where_kernels_are_interpreted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched: list[str] = []
    for interpreted in "10":
        monkeypatch.setenv("TRITON_INTERPRET", interpreted)
        ahead.compile_beside(torch.device("cpu"), lambda: launched.append("once"), "a kind")
    assert launched == ["once"]


UNDER = """
import contextlib, os
from pathlib import Path

def under(pid):
    try:
        found = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        return []
    return [each for child in found for each in (child, *under(child))]

def open_files(pid):
    "Yield what a process has open; it may close some meanwhile, or end."
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for held in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                yield os.readlink(held)
"""

ASK = """
import os, signal, sys, threading, time
from pathlib import Path
from tgi_trio.shard.torch_backend.compiling import compilers

compilers.usable_cores = lambda: [0, 1]
ring = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.set_inheritable(ring, True)

def input_of(pid):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return os.readlink(f"/proc/{pid}/fd/0")

def serving(pids):
    return [input_of(pid) for pid in pids[1:]] == ["/dev/null"] * 2

with compilers.compilers(lambda: ("cuda", 90, 32)) as others:
    assert not under(os.getpid())
    asker = threading.Thread(target=others.compile, args=('{"name": "os.none"}',))
    asker.start()
    asker.join()  # it answers, and goes on when the thread that started it has ended
    for _ in range(6000):
        if serving(under(os.getpid())):  # both of those that the first of them forks
            break
        time.sleep(0.01)
    for pid in under(os.getpid()):
        print(pid, *set(open_files(pid)), flush=True)
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["killed", "left"])
def test_compilers_hold_nothing_and_end_with_who_asks(tmp_path: Path, end: str) -> None:
    argv = [sys.executable, "-c", UNDER + ASK, str(tmp_path / "ring"), end]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    assert done.returncode == (-signal.SIGKILL if end == "killed" else 0), done.stderr
    told = [line.split() for line in done.stdout.splitlines()]
    assert len(told) == 3
    of_zygote = "pipe:"  # its standard input
    for _, *held in told:
        assert all(name.startswith(("/dev/null", "socket:", of_zygote)) for name in held)
        of_zygote = "socket:"
    deadline = time.monotonic() + 60  # who leaves waits for them, but not for long
    while any(Path(f"/proc/{pid}").exists() for pid, *_ in told):
        assert time.monotonic() < deadline, told
        time.sleep(0.01)


SHARE = """
import threading, time
import torch
from triton import knobs
from triton.runtime import driver
from tgi_trio.shard.torch_backend.compiling import compilers, zygote
from tgi_trio.testing.kernel_variants import variants

compilers.usable_cores = lambda: [0, 1]
target = ["cuda", 90, 32]
zygote._aim_at(target)
driver.active.get_current_stream = lambda device=None: 0
variant = next(each for each in variants("hopper") if each.name == "gate bf16 silu")
asked, told = [], []
knobs.runtime.jit_cache_hook = lambda **given: asked.append(given["compile"]) or True
given = [kind if isinstance(kind, torch.dtype) else 1.5 for kind in variant.arguments]
variant.kernel.warmup(*given, **variant.constants, grid=(1,))
knobs.runtime.jit_cache_hook = None
data = asked[0]["specialization_data"]

def waiting():
    "Whether a process below this one has the file of locks open."
    return any(zygote.LOCKS in name for pid in under(os.getpid()) for name in open_files(pid))

def inode():
    (made,) = Path(knobs.cache.dir).rglob("gate.cubin")
    return made.stat().st_ino

with compilers.compilers(lambda: target) as others:
    others.begin()  # children of this thread
    asker = threading.Thread(target=lambda: told.append(others.compile(data)))
    with zygote.alone_with(data):
        asker.start()
        deadline = time.monotonic() + 120
        while not waiting():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        variant.kernel.preload(data)
        made = inode()
    asker.join()
print(told, inode() == made)
"""


def test_a_kernel_that_several_ask_for_is_compiled_once(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    argv = [sys.executable, "-c", UNDER + SHARE]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, env=environment)
    assert done.stdout == "[True] True\n", done.stderr


KEYS = """
import os, sys
from tgi_trio.shard.torch_backend.compiling.kernel_keys import settle_key
from tgi_trio.shard.torch_backend.kernels.sampling import choosing, surveying

for names in (("choose_tokens", "survey_scores"), ("survey_scores", "choose_tokens")):
    if os.fork() == 0:
        keys = {}
        for name in names:
            function = getattr(choosing, name, None) or getattr(surveying, name)
            settle_key(function)
            keys[name] = function.cache_key
        print(sorted(keys.items()), flush=True)
        os._exit(0)
    os.wait()
"""


def test_keys_of_kernels_that_call_the_same_do_not_depend_on_which_came_first() -> None:
    environment = dict(os.environ)
    environment.pop("TRITON_INTERPRET", None)
    argv = [sys.executable, "-c", KEYS]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, env=environment)
    first, second = done.stdout.splitlines()
    assert first == second and "choose_tokens" in first, done.stderr
