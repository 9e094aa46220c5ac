"""From a module of LLVM to an object file that can be opened without LLVM's optimiser."""

from __future__ import annotations

import ctypes
from pathlib import Path

import llvmlite.binding as llvm

from tgi_trio.shard.cpu_backend.machine_code.object_files import machine_facts, target_machine
from tgi_trio.shard.cpu_backend.machine_code.object_symbols import missing_symbols

_LEVEL = 3  # of LLVM's optimisation


def origin_of(text: str) -> bytes:
    """Return all that decides on the object file of a module."""
    return repr((text, machine_facts(), Path(__file__).read_bytes())).encode()


def make_optimised(text: str) -> bytes:
    """Return the object file of a module in LLVM's language, optimised for this machine.

    Raises RuntimeError as LLVM does, and for code that calls what this process does not have.
    """
    machine = target_machine(_LEVEL)
    module = llvm.parse_assembly(text)
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=_LEVEL)
    options.loop_vectorization, options.slp_vectorization = True, False
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    data: bytes = machine.emit_object(module)
    process = ctypes.CDLL(None)
    if strange := [name for name in missing_symbols(data) if not hasattr(process, name)]:
        raise RuntimeError(f"the code calls what is not there: {', '.join(strange)}")
    return data
