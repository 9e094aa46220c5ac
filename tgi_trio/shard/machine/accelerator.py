"""torch's accelerators behind one interface, and the only place that knows how kinds differ.

`torch.accelerator` covers all kinds: which one there is, its streams, events and memory. torch
calls AMD's devices "cuda" too, and they run the same Triton kernels and graphs; Intel's are "xpu".
"""

from __future__ import annotations

from types import ModuleType

import torch

from tgi_trio.errors import ConfigurationError

_WITH_KERNELS = ("cuda",)  # kinds with our Triton kernels and recorded graphs


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device is not the CPU."""
    return device.type != "cpu"


def runs_kernels(device: torch.device) -> bool:
    """Return whether our kernels and recordings support this kind of device."""
    return device.type in _WITH_KERNELS


def current_kind() -> str:
    """Return the kind of accelerator that torch sees, such as "cuda"; empty for none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return "" if found is None else found.type


def is_kind(name: str) -> bool:
    """Return whether torch has devices of this name, here or elsewhere."""
    try:
        torch.device(name)
    except RuntimeError:
        return False
    return True


def count_devices() -> int:
    """Return how many devices torch sees."""
    return torch.accelerator.device_count()


def current_device(kind: str) -> torch.device:
    """Return the current device of a kind, with its index."""
    return torch.device(kind, torch.accelerator.current_device_index())


def find_name(device: torch.device) -> str:
    """Return a device's product name, such as "NVIDIA A10G"; its kind if torch has no name."""
    tell = getattr(_module(device), "get_device_name", None)
    return device.type if tell is None else str(tell(device))


def synchronize(device: torch.device) -> None:
    """Wait for everything that has been launched; returns at once on a CPU."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def record_event(device: torch.device, *, timed: bool = False) -> torch.Event:
    """Return an event recorded behind everything that has been launched so far."""
    event = torch.Event(device.type, enable_timing=timed)
    event.record(torch.accelerator.current_stream(device))
    return event


def free_bytes(device: torch.device) -> int:
    """Return the bytes of a device's memory that this process may still allocate."""
    torch.accelerator.empty_cache()  # what torch's allocator has cached is free for us
    tell = getattr(torch.accelerator, "get_memory_info", None)  # from torch 2.9 on
    free, total = _module(device).mem_get_info(device) if tell is None else tell(device)
    share = getattr(_module(device), "get_per_process_memory_fraction", None)
    return int(free) if share is None else max(0, int(free - (1 - share(device)) * total))


def reset_peak(device: torch.device) -> int:
    """Forget the peak so far; return the bytes held now, from which the next one is counted."""
    torch.accelerator.reset_peak_memory_stats(device)
    return int(torch.accelerator.memory_allocated(device))


def peak_bytes(device: torch.device) -> int:
    """Return the most this process has held since `reset_peak`."""
    return int(torch.accelerator.max_memory_allocated(device))


def limit_memory(device: torch.device, share: float) -> None:
    """Limit this process to `share` of a device's memory, as `free_bytes` takes into account.

    Raises ConfigurationError for a kind of device without such a limit.
    """
    if share == 1.0:
        return
    limit = getattr(_module(device), "set_per_process_memory_fraction", None)
    if limit is None:
        raise ConfigurationError(
            f"--cuda-memory-fraction cannot be kept to on {device.type} devices; leave it out."
        )
    limit(share, device)


def _module(device: torch.device) -> ModuleType:
    """Return torch's module of a kind of device, such as `torch.cuda`."""
    found: ModuleType = getattr(torch, device.type)
    return found
