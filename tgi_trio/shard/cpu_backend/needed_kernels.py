"""The kernels that a model needs, in the order in which they are loaded."""

from __future__ import annotations

from collections.abc import Iterable

from tgi_trio.shard.cpu_backend.adapter_kernels import of_adapters
from tgi_trio.shard.cpu_backend.kernel_groups import KernelGroup
from tgi_trio.shard.cpu_backend.machine_code.entry import (
    DRAW_UNIFORMS,
    EXPAND,
    SHRINK,
    SHUFFLE,
    TAKE_PART,
    WAYS,
    WORK_ON_ROWS,
)
from tgi_trio.shard.cpu_backend.machine_code.parallel import Kernel
from tgi_trio.shard.cpu_backend.multiplier import Multiplier
from tgi_trio.shard.cpu_backend.variant import Variant


def list_kernels(
    variant: Variant,
    multipliers: Iterable[Multiplier],
    groups: Iterable[KernelGroup],
    *,
    adapters: bool,
) -> list[Kernel]:
    """Return every kernel of a shard: those of the step, those that it calls, and the sampler's."""
    found: list[Kernel] = [(TAKE_PART, variant)]
    found += [(WAYS[each.way], each) for each in multipliers]
    found += [(each.entry, each.choose(variant)) for each in groups]
    found += [(entry, of_adapters(variant)) for entry in (SHRINK, EXPAND) if adapters]
    return found + [(entry, None) for entry in (DRAW_UNIFORMS, SHUFFLE, WORK_ON_ROWS)]
