"""The kernels of LoRA adapters, compiled for a variant."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tgi_trio.shard.cpu_backend.machine_code.entry import EXPAND, SHRINK
from tgi_trio.shard.cpu_backend.machine_code.object_files import MachineCode
from tgi_trio.shard.cpu_backend.variant import Variant, narrowed


@dataclass(frozen=True, slots=True)
class AdapterKernels:
    """Both entries of `kernels/adapters.py`."""

    shrink: MachineCode
    expand: MachineCode


def of_adapters(variant: Variant) -> Variant:
    """Return the variant for adapters, whose weights have the model's dtype, not the layers'."""
    return narrowed(replace(variant, weights=variant.kv))


def open_adapter_kernels(variant: Variant) -> AdapterKernels:
    """Compile or load the kernels; raises what the compiler raises for lack of instructions."""
    own = of_adapters(variant)
    return AdapterKernels(SHRINK.open(own), EXPAND.open(own))
