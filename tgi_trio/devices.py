"""Whether this machine may have an accelerator, asked without torch: it takes seconds to import."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import MutableMapping
from pathlib import Path

from tgi_trio.errors import ConfigurationError

_CUDA_DRIVER = "libcuda.so.1"
_ROCM_DRIVER = Path("/dev/kfd")  # torch calls AMD's devices CUDA, too
_INTEL_DRIVER = "libze_intel_gpu.so.1"
_DEV = Path("/dev")
_NO_LIST = frozenset(("all", "void", ""))  # what NVIDIA's container runtime is told besides


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
    return _has_cuda_driver() or _ROCM_DRIVER.exists() or _has_library(_INTEL_DRIVER)


def hide_devices(environ: MutableMapping[str, str], dev: Path = _DEV) -> None:
    """Have torch see those of NVIDIA's devices alone that NVIDIA_VISIBLE_DEVICES lists.

    Their container runtime heeds it, and numbers anew what it leaves; where more are here than are
    listed there was none, and the driver has to be told by its own variable. To be called before
    torch looks. AMD's and Intel's drivers read their variables themselves.
    """
    listed = environ.get("NVIDIA_VISIBLE_DEVICES", "all").strip()
    if "CUDA_VISIBLE_DEVICES" in environ or listed in _NO_LIST:
        return
    names = [] if listed == "none" else listed.split(",")
    here = sum(path.name.removeprefix("nvidia").isdigit() for path in dev.glob("nvidia*"))
    if here > len(names):
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(names)


def may_see_device() -> bool:
    """Return whether torch may see a device; False is certain.

    Takes up to a second, where a driver is: it is asked in a process of its own, since it would
    keep threads, memory and the device itself.
    """
    if torch_is_for_cpus():
        return False
    if _has_cuda_driver():
        return _count_cuda_devices() != 0
    return _ROCM_DRIVER.exists() or _has_library(_INTEL_DRIVER)


def torch_is_for_cpus() -> bool:
    """Return whether the torch that is installed can use no device, or none is."""
    from importlib.metadata import PackageNotFoundError, version  # slow, and rarely needed

    try:
        return version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return True


def _has_cuda_driver() -> bool:
    return _has_library(_CUDA_DRIVER)


def _has_library(name: str) -> bool:
    import ctypes  # opens files, which may not get the numbers of closed standard streams

    try:
        ctypes.CDLL(name)
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
