"""Devices by name, as torch wants them."""

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

Generation = Literal["ampere", "hopper"]  # of devices, as far as kernels care

# Bytes of shared memory that a program may have, from which on tiles are Hopper's. Devices for
# desks have 99 KB of any generation, 12.0 among them, and no instructions for such tiles.
_HOPPER_SHARED: Final = 200 << 10


def resolve_device(name: str) -> torch.device:
    """Return the device of a name such as "cpu", "cuda:1" or "cuda", the current one of several.

    Always with an index where there are several: torch tells of no other device's memory.
    """
    device = torch.device(name)
    if is_accelerator(device) and device.index is None:
        return current_device(device.type)
    return device


def without_gradients() -> AbstractContextManager[object]:
    """Return torch's mode in which nothing is kept for gradients, to be entered.

    Entering it takes as long as two copies: a thread that serves is in it, and stays so.
    """
    return _NOTHING if torch.is_inference_mode_enabled() else torch.inference_mode()


@functools.cache  # each look takes tens of microseconds, and every layer asks
def has_triton() -> bool:
    """Return whether our own kernels can be compiled."""
    return importlib.util.find_spec("triton") is not None


def interprets_kernels() -> bool:
    """Return whether Triton interprets our kernels on a CPU, where what they take says nothing."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def runs_kernels(device: torch.device) -> bool:
    """Return whether our own kernels run on a device."""
    return accelerator.runs_kernels(device) and has_triton()


def generation(device: torch.device) -> Generation:
    """Return whose tiles a device gets: "hopper" from compute capability 9.0 on, NVIDIA's alone.

    Those need more shared memory than every such device has; "ampere" fits into 99 KB.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return "ampere"
    found: Any = torch.cuda.get_device_properties(device)
    large = found.shared_memory_per_block_optin >= _HOPPER_SHARED
    return "hopper" if large and found.major >= 9 else "ampere"


@functools.cache  # every launch asks
def overlap(device: torch.device) -> dict[str, bool]:
    """Return what kernels are launched with: whether one may begin before the one before has ended.

    Both what Triton launches it with and its constant; see `kernels/overlapping.py`.
    """
    if interprets_kernels() or generation(device) != "hopper":
        return {"OVERLAPS": False}
    return {"OVERLAPS": True, "launch_pdl": True}


def limit_registers(most: int) -> dict[str, int]:
    """Return what kernels are launched with whose threads are to have `most` registers at most.

    Then more programs run together than the assembler takes into account. It is NVIDIA's alone.
    """
    return {} if torch.version.hip is not None else {"maxnreg": most}


@functools.cache
def count_multiprocessors(device: torch.device) -> int:
    """Return how many programs a device runs at least at the same time."""
    if device.type != "cuda":
        return 1
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
