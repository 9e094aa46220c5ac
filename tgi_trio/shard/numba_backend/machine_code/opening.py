"""Object files made callable, and made of LLVM's text: llvmlite alone, no numba."""

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

SYMBOL: Final = "run"  # what the function is called in its object file


@dataclass(frozen=True, slots=True)
class MachineCode:
    """A function of whole numbers. Called, it lets Python's other threads run.

    It is there as long as this object; nobody may call its address later.
    """

    address: int
    _call: Callable[..., int]
    _leading: tuple[Any, ...]  # arguments before the numbers, and what they point to
    _engine: Any  # holds the code

    def __call__(self, *numbers: int) -> int:
        return self._call(*self._leading, *numbers)


def host() -> tuple[str, str]:
    """Return the processor's name and its instructions, for LLVM, as numba is told as well."""
    name = os.environ.get("NUMBA_CPU_NAME") or llvm.get_host_cpu_name()
    features = os.environ.get("NUMBA_CPU_FEATURES")
    return name, llvm.get_host_cpu_features().flatten() if features is None else features


def file_name(kernel: str, choice: object) -> str:
    """Return what the machine code of a kernel is kept as, made as chosen for this machine.

    `choice` has a `repr` that says all of it.
    """
    facts = repr((choice, host(), _versions()))
    return f"{kernel}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.o"


@cache
def _versions() -> tuple[str, ...]:
    return sys.implementation.cache_tag or "", *map(version, ("llvmlite", "numba"))


def make_object(module: Any) -> bytes:
    """Return the object file of a module in `llvmlite.ir`.

    LLVM's passes are left out: they take as long as all else. Raises what LLVM raises.
    """
    parsed = llvm.parse_assembly(str(module))
    made: bytes = _machine().emit_object(parsed)
    return made


def open_object(data: bytes, integers: int, leading: tuple[Any, ...] = ()) -> MachineCode:
    """Return the function `SYMBOL` of an object file, int32 of so many int64.

    `leading`: arguments before these, addresses in ctypes. Raises RuntimeError as LLVM does.
    """
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(data))
    engine.finalize_object()
    where = engine.get_function_address(SYMBOL)
    if not where:
        raise RuntimeError(f"there is no function {SYMBOL!r} in the machine code")
    kinds = [ctypes.c_void_p] * len(leading) + [ctypes.c_int64] * integers
    call = ctypes.CFUNCTYPE(ctypes.c_int32, *kinds)(where)
    return MachineCode(where, call, leading, engine)


def _machine() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    name, features = host()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(cpu=name, features=features, opt=2)
