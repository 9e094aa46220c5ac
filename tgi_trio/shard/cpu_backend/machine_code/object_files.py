"""Loading object files, and compiling LLVM IR to them: with llvmlite alone."""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any, Final

import llvmlite.binding as llvm

SYMBOL: Final = "run"  # name of the function in its object file


@dataclass(frozen=True, slots=True)
class MachineCode:
    """A compiled function of integers. Calling it releases the GIL.

    The code is freed with this object; its address must not be called later.
    """

    address: int
    _call: Callable[..., int]
    _engine: Any  # owns the code

    def __call__(self, *numbers: int) -> int:
        return self._call(*numbers)


def host() -> tuple[str, str]:
    """Return the processor's name and features for LLVM, which two variables may replace."""
    name = os.environ.get("KERNEL_CPU_NAME") or llvm.get_host_cpu_name()
    features = os.environ.get("KERNEL_CPU_FEATURES")
    return name, llvm.get_host_cpu_features().flatten() if features is None else features


def file_name(kernel: str, choice: object) -> str:
    """Return the file name for a kernel's machine code, for a choice and this machine.

    The `repr` of `choice` has to be complete.
    """
    facts = repr((choice, *machine_facts()))
    return f"{kernel}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.o"


def machine_facts() -> tuple[object, ...]:
    """Return what machine code depends on, beside what it is made of."""
    return host(), _versions()


@cache
def _versions() -> tuple[str, ...]:
    return sys.implementation.cache_tag or "", version("llvmlite")


def make_object(module: Any) -> bytes:
    """Return the object file of a module in `llvmlite.ir`.

    LLVM's optimisation passes are left out: they take as long as everything else. Raises what LLVM
    raises.
    """
    parsed = llvm.parse_assembly(str(module))
    made: bytes = target_machine().emit_object(parsed)
    return made


def open_object(data: bytes, integers: int) -> MachineCode:
    """Return the function `SYMBOL` of an object file, from so many int64 to int32.

    Raises RuntimeError as LLVM does.
    """
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(data))
    engine.finalize_object()
    where = engine.get_function_address(SYMBOL)
    if not where:
        raise RuntimeError(f"there is no function {SYMBOL!r} in the machine code")
    call = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_int64] * integers)(where)
    return MachineCode(where, call, engine)


def target_machine(level: int = 2) -> Any:
    """Return LLVM's description of this machine, which generates code; `level`: 0 to 3."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    name, features = host()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(cpu=name, features=features, opt=level)
