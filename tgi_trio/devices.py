"""Whether this machine may have an accelerator, asked without torch: it takes seconds to import."""

from __future__ import annotations

import ctypes
from pathlib import Path

from tgi_trio.errors import ConfigurationError

_CUDA_DRIVER = "libcuda.so.1"
_ROCM_DRIVER = Path("/dev/kfd")  # torch calls AMD's devices CUDA, too


def has_driver() -> bool:
    """Return whether a driver is installed through which torch could see a device."""
    try:
        ctypes.CDLL(_CUDA_DRIVER)
    except OSError:
        return _ROCM_DRIVER.exists()
    return True


def check_device_flags(cuda_graphs: tuple[int, ...] | None, cuda_memory_fraction: float) -> None:
    """Raise ConfigurationError for flags that mean nothing without a device; call it where none is.

    `cuda_graphs`: batch sizes that were asked for; None and (): none were.
    """
    if cuda_memory_fraction != 1.0:
        raise ConfigurationError(_no_device("--cuda-memory-fraction", "leave it out"))
    if cuda_graphs:
        raise ConfigurationError(_no_device("--cuda-graphs", "leave it out or give 0"))


def _no_device(flag: str, cure: str) -> str:
    return f"{flag} needs a CUDA device, and torch sees none here; {cure}."
