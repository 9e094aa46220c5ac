"""Whether this machine may have an accelerator, asked without torch: it takes seconds to import."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

from tgi_trio.errors import ConfigurationError

_CUDA_DRIVER = "libcuda.so.1"
_ROCM_DRIVER = Path("/dev/kfd")  # torch calls AMD's devices CUDA, too


# A driver can be there without a device; any error of its own means that torch sees none either.
_COUNT = """
import ctypes, sys
driver, count = ctypes.CDLL(sys.argv[1]), ctypes.c_int()
failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
print(0 if failed else count.value)
"""
_PATIENCE_S = 60.0  # for a driver that wakes its devices up


def has_driver() -> bool:
    """Return whether a driver is installed through which torch could see a device."""
    return _has_cuda_driver() or _ROCM_DRIVER.exists()


def may_see_device() -> bool:
    """Return whether torch may see a device; False is certain.

    Takes up to a second, where a driver is: it is asked in a process of its own, since it would
    keep threads, memory and the device itself.
    """
    if torch_is_for_cpus():
        return False
    return _count_cuda_devices() != 0 if _has_cuda_driver() else _ROCM_DRIVER.exists()


def torch_is_for_cpus() -> bool:
    """Return whether the torch that is installed can use no device, or none is."""
    from importlib.metadata import PackageNotFoundError, version  # slow, and rarely needed

    try:
        return version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return True


def _has_cuda_driver() -> bool:
    try:
        ctypes.CDLL(_CUDA_DRIVER)
    except OSError:
        return False
    return True


def _count_cuda_devices() -> int | None:
    """Return how many devices the driver has for this process; None where it does not say."""
    argv = [sys.executable, "-I", "-c", _COUNT, _CUDA_DRIVER]
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return int(done.stdout) if done.returncode == 0 else None


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
