"""Kernels are compiled before they are launched, for a device that is named and not there."""

from __future__ import annotations

import os
import subprocess
import sys
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
from tgi_trio.shard.torch_backend import compiling_ahead
from tgi_trio.testing.kernel_variants import variants

compiling_ahead.runs_kernels = lambda device: True
torch.cuda.device = lambda device: contextlib.nullcontext()
(variant,) = [each for each in variants("hopper") if each.name == sys.argv[1]]

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
print(compiling_ahead.compile_ahead(device, launch), launched)
compiling, anew = False, []
knobs.runtime.jit_cache_hook = lambda **told: anew.append(told["fn"].name) and False
launch()
print(anew, len(launched))
compiling = True
print(compiling_ahead.compile_ahead(device, launch), len(launched))
print(compiling_ahead.compile_ahead(device, fail), len(launched))
compiling = False
launch()
print(anew, len(launched))
"""


def test_what_is_launched_later_has_been_compiled(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    argv = [sys.executable, "-c", COMPILE, "gate bf16 silu"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    told = ["1 []", "[] 2", "0 2", "0 2", "[] 4"]  # what is compiled already does not run, either
    assert done.stdout.splitlines() == told
    assert "not this way" in done.stderr and "where they are launched first" in done.stderr
