"""Torch devices by name, and the properties of them that our kernels depend on."""

from __future__ import annotations

import functools
import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Literal

import torch

from tgi_trio.shard.machine import accelerator
from tgi_trio.shard.machine.accelerator import current_device, is_accelerator

_NOTHING: Final = nullcontext()

# How Triton multiplies float32 numbers as precisely as torch does. Tensor cores do with three
# products for one; on AMD's devices no compiler makes these.
FLOAT32_PRODUCTS: Final = "ieee" if torch.version.hip else "tf32x3"

Generation = Literal["ampere", "hopper"]  # of devices, as far as kernels distinguish them

# A program must be allowed at least so many bytes of shared memory for Hopper's tiles. Desktop
# devices of any generation, including 12.0, have 99 KB, and no instructions for such tiles.
_HOPPER_SHARED: Final = 200 << 10


def resolve_device(name: str) -> torch.device:
    """Return the device of a name such as "cpu", "cuda:1" or "cuda" (the current one).

    An accelerator always gets an index, without which torch does not report its memory.
    """
    device = torch.device(name)
    if is_accelerator(device) and device.index is None:
        return current_device(device.type)
    return device


def without_gradients() -> AbstractContextManager[object]:
    """Return a context with torch's inference mode on; one that does nothing if it is on already.

    Entering the mode takes as long as two copies, so a thread that serves stays in it.
    """
    return _NOTHING if torch.is_inference_mode_enabled() else torch.inference_mode()


@functools.cache  # `find_spec` takes tens of microseconds, and every layer calls this
def has_triton() -> bool:
    """Return whether our own kernels can be compiled."""
    return importlib.util.find_spec("triton") is not None


def interprets_kernels() -> bool:
    """Return whether Triton interprets our kernels on a CPU, where timing them means nothing."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def runs_kernels(device: torch.device) -> bool:
    """Return whether our own kernels run on a device."""
    return accelerator.runs_kernels(device) and has_triton()


def generation(device: torch.device) -> Generation:
    """Return for which generation tiles are chosen; "ampere" fits into 99 KB of shared memory.

    "hopper" is for NVIDIA's devices from compute capability 9.0 on that have the shared memory:
    not all of them do.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return "ampere"
    found: Any = torch.cuda.get_device_properties(device)
    large = found.shared_memory_per_block_optin >= _HOPPER_SHARED
    return "hopper" if large and found.major >= 9 else "ampere"


@functools.cache  # every launch calls this
def overlap(device: torch.device) -> dict[str, bool]:
    """Return launch arguments for programmatic dependent launch, if the device supports it.

    With it, a kernel may begin before the previous one has ended. The arguments are Triton's option
    and the kernel's own constant; see `kernels/overlapping.py`.
    """
    if interprets_kernels() or generation(device) != "hopper":
        return {"OVERLAPS": False}
    return {"OVERLAPS": True, "launch_pdl": True}


def limit_registers(most: int) -> dict[str, int]:
    """Return launch arguments that limit a kernel's threads to `most` registers each.

    More programs run together then than the assembler would allow for. For NVIDIA's devices only.
    """
    return {} if torch.version.hip is not None else {"maxnreg": most}


@functools.cache
def count_multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors: a device runs at least so many programs at a time."""
    if device.type != "cuda":
        return 1
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def draft_budget(device: torch.device) -> int:
    """Return `ShardInfo.draft_budget`.

    On a CPU, a token adds a twentieth or more to a step's time; on a device, reading the weights
    takes most of the time for up to hundreds of tokens.
    """
    return 8 if device.type == "cpu" else 256
