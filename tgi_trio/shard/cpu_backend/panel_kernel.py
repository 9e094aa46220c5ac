"""Products with quantised weights, compiled for one kind."""

from __future__ import annotations

from dataclasses import dataclass

from tgi_trio.shard.cpu_backend.kinds.kind import BLOCK_INPUTS
from tgi_trio.shard.cpu_backend.machine_code.entry import WAYS
from tgi_trio.shard.cpu_backend.machine_code.object_files import MachineCode
from tgi_trio.shard.cpu_backend.multiplier import Multiplier
from tgi_trio.shard.cpu_backend.scratch_memory import PRODUCTS_BYTES


@dataclass(frozen=True, slots=True)
class PanelKernel:
    """A compiled way; `code` has the arguments of `multiply_by_vectors` in `kernels/quantised/`."""

    multiplier: Multiplier
    code: MachineCode

    def room_bytes(self, inputs: int) -> int:
        """Return the size of an unpacked panel, with what a matrix unit needs behind it."""
        unpacked = self.multiplier.unpacked
        products = PRODUCTS_BYTES if self.multiplier.matrix else 0
        return inputs // BLOCK_INPUTS * unpacked.block_bytes + products


def open_panel_kernel(multiplier: Multiplier) -> PanelKernel:
    """Compile or load it; raises what the compiler raises for lack of instructions."""
    return PanelKernel(multiplier, WAYS[multiplier.way].open(multiplier))
