"""`memory.py` for any device of torch's: the host's memory is a CPU's."""

from __future__ import annotations

import torch

from tgi_trio.shard.machine import memory


def free_bytes(device: torch.device, ranks: int = 1) -> int:
    """Return the bytes that can still be had; of the host's memory, one of `ranks` gets its part.

    On a device no more than the share that `device.limit_memory` leaves this process.
    """
    if device.type != "cuda":
        return memory.free_bytes() // ranks
    torch.cuda.empty_cache()  # what torch keeps for later is ours to have
    free, total = torch.cuda.mem_get_info(device)
    share = torch.cuda.get_per_process_memory_fraction(device)
    return max(0, int(free - (1 - share) * total))


def reset_peak(device: torch.device) -> int:
    """Forget the peak so far; return the bytes held now, from which the next one is counted."""
    if device.type != "cuda":
        return memory.reset_peak()
    torch.cuda.reset_peak_memory_stats(device)
    return int(torch.cuda.memory_allocated(device))


def peak_bytes(device: torch.device) -> int:
    """Return the most this process has held since `reset_peak`."""
    if device.type != "cuda":
        return memory.peak_bytes()
    return int(torch.cuda.max_memory_allocated(device))
