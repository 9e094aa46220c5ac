"""What computes LoRA adapters, compiled for a variant."""

from __future__ import annotations

from dataclasses import dataclass

from tgi_trio.shard.numba_backend.machine_code.entry import EXPAND, SHRINK
from tgi_trio.shard.numba_backend.machine_code.opening import MachineCode
from tgi_trio.shard.numba_backend.variant import Variant


@dataclass(frozen=True, slots=True)
class AdapterKernels:
    """Both entries of `kernels/adapters.py`."""

    shrink: MachineCode
    expand: MachineCode


def open_adapter_kernels(variant: Variant) -> AdapterKernels:
    """Compile, or take what is kept; raises what the compiler raises without instructions."""
    return AdapterKernels(SHRINK.open(variant), EXPAND.open(variant))
