"""Kernels are compiled before they are launched, for a device that is named and not there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

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
assert "torch._dynamo" not in sys.modules  # two seconds
"""


def test_what_is_launched_later_has_been_compiled(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    argv = [sys.executable, "-c", COMPILE, "gate bf16 silu", "gate bf16 gelu"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    by_another, by_itself = "1 [] []", "1 4 ['gate']"
    # What is compiled already does not run, either.
    told = [by_another, "[] 2", "0 2", "0 2", "[] 4 []", by_itself]
    assert done.stdout.splitlines() == told
    assert "not this way" in done.stderr and "where they are launched first" in done.stderr


ASK = """
import os, signal, sys, threading, time
from pathlib import Path
from tgi_trio.shard.torch_backend.compiling import compilers

compilers.usable_cores = lambda: [0, 1]
ring = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.set_inheritable(ring, True)

def under(pid):
    found = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return [each for child in found for each in (child, *under(child))]

with compilers.compilers(("cuda", 90, 32)) as others:
    assert not under(os.getpid())
    asker = threading.Thread(target=others.compile, args=('{"name": "os.none"}',))
    asker.start()
    asker.join()  # it answers, and goes on when the thread that started it has ended
    for _ in range(6000):
        if len(under(os.getpid())) == 3:
            break
        time.sleep(0.01)
    for pid in under(os.getpid()):
        open_ = {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()}
        print(pid, *open_, flush=True)
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["killed", "left"])
def test_compilers_hold_nothing_and_end_with_who_asks(tmp_path: Path, end: str) -> None:
    argv = [sys.executable, "-c", ASK, str(tmp_path / "ring"), end]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    assert done.returncode == (-signal.SIGKILL if end == "killed" else 0), done.stderr
    told = [line.split() for line in done.stdout.splitlines()]
    assert len(told) == 3
    of_zygote = "pipe:"  # its standard input
    for _, *held in told:
        assert all(name.startswith(("/dev/null", "socket:", of_zygote)) for name in held)
        of_zygote = "socket:"
    deadline = time.monotonic() + 60 * (end == "killed")  # else they have been waited for
    while any(Path(f"/proc/{pid}").exists() for pid, *_ in told):
        assert time.monotonic() < deadline, told
        time.sleep(0.01)


KEYS = """
import os, sys
from tgi_trio.shard.torch_backend.compiling.kernel_keys import settle_key
from tgi_trio.shard.torch_backend.kernels import choosing, surveying

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
