"""`memory.py` for any device of torch's: the host's memory is a CPU's."""

from __future__ import annotations

import torch

from tgi_trio.shard.machine import accelerator, memory


def free_bytes(device: torch.device, ranks: int = 1) -> int:
    """Return the bytes that can still be allocated; the host's memory is divided among `ranks`.

    On a device this is within the share that `device.limit_memory` has set.
    """
    if accelerator.is_accelerator(device):
        return accelerator.free_bytes(device)
    return memory.free_bytes() // ranks


def reset_peak(device: torch.device) -> int:
    """Forget the peak so far; return the bytes held now, from which the next one is counted."""
    if accelerator.is_accelerator(device):
        return accelerator.reset_peak(device)
    return memory.reset_peak()


def peak_bytes(device: torch.device) -> int:
    """Return the most this process has held since `reset_peak`."""
    return accelerator.peak_bytes(device) if device.type != "cpu" else memory.peak_bytes()
